"""The first update by a plan says, on one rank of the job, what another number of redundant slots would do."""

import logging
import threading

import program_arms as arms
from layouts import Case
from program import Layout

from foremoe import CostModel


def messages(_group, case, num_steps):
    """What the logger of the sentence said on this rank."""
    logger, found = logging.getLogger("foremoe.integrations.better_slots"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        arms.run(case, num_steps, planned=True, cost=CostModel())
        for thread in threading.enumerate():
            if thread.name == "choosing slots":
                thread.join()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return found


def test_one_rank_says_it_once(pool):
    first, *others = pool.run(messages, Case(4, Layout(ep=2, M=2)), 2, num_ranks=4, limit_s=300.0)
    assert not any(others)
    # A toy update gains nothing from a slot.
    assert len(first) == 1 and first[0].startswith("redundant=0 in place of 1 would make this update "), first
