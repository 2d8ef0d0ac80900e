"""veRL's own worker takes what the engine says, drops the metrics of a recompute, and takes means over mini-batches."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import types
from unittest.mock import patch

import numpy as np
import pytest
from program import Layout

from foremoe.integrations.settings import Settings

LAYOUT = Layout(ep=2)
SECONDS = ("plan_s", "share_s", "begin_s", "begin_exposed_s", "exposed_s")


def work(_group, settings):
    """Metrics of a recompute and of an update by `TrainingWorker`, as the trainer reduces them; and parts of every stage."""
    from engine_program import EngineProgram, policy_loss
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_name
    from verl.utils.metric import reduce_metrics
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine_workers import TrainingWorker

    from foremoe.integrations.verl.metrics import Totals

    program = EngineProgram(LAYOUT, "R3", settings)
    engine, space = program.engine, types.SimpleNamespace
    engine._is_offload_param = engine._is_offload_optimizer = False
    engine.lr_scheduler = space(step=lambda _: None)
    worker = TrainingWorker.__new__(TrainingWorker)  # its __init__ makes process groups and downloads a model
    worker.engine, worker.loss_fn, worker.flops_counter = engine, policy_loss, None
    worker.engine_config = space(
        **vars(engine.engine_config), forward_only=False, use_dynamic_bsz=True, max_token_len_per_gpu=40,
        micro_batch_size_per_gpu=None, infer_max_token_len_per_gpu=40, infer_micro_batch_size_per_gpu=None,
    )  # fmt: skip
    worker.model_config, worker.device_name, worker.profiler = {}, get_device_name(), DistProfiler(rank=0)
    stages, add = [], Totals.add
    with patch.object(Totals, "add", lambda totals, parts: (stages.append(parts), add(totals, parts))):
        recompute = worker.infer_batch(tu.assign_non_tensor(program.batch(0), compute_loss=False))
        update = worker.train_mini_batch(tu.assign_non_tensor(program.batch(0), num_mini_batch=2))
    if settings is not None:
        engine._foremoe.close()
    return [reduce_metrics(tu.get(output, "metrics")) for output in (recompute, update)], stages


def of_one_rank(stages):
    """What a rank adds up over the stages of a kind: name -> value."""
    values = lambda name: [[part.values[name] for part in parts] for parts in stages]  # noqa: E731
    rows = [parts[0].num_rows for parts in stages]
    found = {name: sum(max(ranks) for ranks in values(name)) for name in SECONDS}
    found |= {name: sum(sum(ranks) for ranks in values(name)) for name in ("received_bytes", "drift")}
    found |= {name: np.average([ranks[0] for ranks in values(name)], weights=rows) for name in ("skew_before", "skew_after")}
    found["replicas"] = sum(ranks[0] for ranks in values("replicas"))
    found["slot_bytes"] = max(max(ranks) for ranks in values("slot_bytes"))
    return found


def test_figures_of_all_stages_reach_the_trainer_with_the_update(pool):
    plain, planned = (pool.run(work, of, timeout_s=120, limit_s=600) for of in (None, Settings(cost="balance")))
    num_stages = {"recompute": 1, "update": 2}
    expected = {}
    for stage, of in (("recompute", slice(0, 1)), ("update", slice(1, 3))):
        ranks = [of_one_rank(stages[of]) for _, stages in planned]
        for name in ranks[0]:
            over_ranks = max if name in SECONDS or name == "slot_bytes" else np.mean
            expected[f"foremoe/{stage}/{name}"] = over_ranks([rank[name] for rank in ranks])
    for ((_, a), _), ((recompute, update), stages) in zip(plain, planned, strict=True):
        assert update["policy_loss"] == pytest.approx(a["policy_loss"], rel=1e-4)
        assert not [name for name in recompute if "foremoe" in name], "which the trainer would not read"
        assert len(stages) == sum(num_stages.values())
        assert {name: update[name] for name in expected} == pytest.approx(expected)
        for stage in num_stages:
            assert update[f"foremoe/{stage}/unplanned"] == 0.0
            assert update[f"foremoe/{stage}/skew_after"] < update[f"foremoe/{stage}/skew_before"]
        assert min(value for name, value in expected.items() if not name.endswith("exposed_s")) > 0


def test_backends_given_up_are_counted_once_however_many_ranks_and_stages_tell_of_them():
    from foremoe.integrations.verl.metrics import Figures, Totals

    totals = Totals()
    for retired in (0.0, 1.0, 1.0):
        totals.add([Figures(first=first, num_rows=2, values={"retired": retired}) for first in (True, False)])
    assert totals.take()["retired"].aggregate() == 1.0
