"""Compilation of kernels before the first stage. One rank per host compiles, and the other ranks load from its cache."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import Any

from foremoe.base.errors import reason
from foremoe.distributed.group import TorchGroup, reporting
from foremoe.runtime.warm import warm_routes
from foremoe.warm import warm_up

_logger = logging.getLogger(__name__)

_ready = False  # whether this process has compiled the kernels


def compile_in_turn(process_group: Any, *, group_timeout_s: float = 300.0, compile_limit_s: float = 1800.0) -> float:
    """Compiles the kernels for planning if necessary. Collective over the ranks of the group.

    Args:
        process_group: Ranks that plan together.
        group_timeout_s: Timeout in seconds for all ranks to arrive.
        compile_limit_s: Timeout in seconds for ranks that compile.

    Returns:
        Seconds that this rank spent compiling and waiting, or 0 if all ranks had the kernels already.
    """
    global _ready
    begin_s = time.perf_counter()
    with contextlib.closing(TorchGroup(process_group, timeout_s=group_timeout_s)) as group, reporting(group):
        answers = group.gather((socket.gethostname(), _ready))
        if all(ready for _, ready in answers):
            return 0.0
        group.timeout_s = compile_limit_s
        hosts = [host for host, _ in answers]
        first = hosts.index(hosts[group.rank]) == group.rank
        for turn in (True, False):
            if first is turn:
                try:
                    warm_up()
                    warm_routes()
                except Exception as error:  # planning will fail in the same way, and its stage will run at home
                    _logger.warning("rank %d could not compile ahead of time: %s", group.rank, reason(error))
            group.barrier()
    _ready = True
    seconds = time.perf_counter() - begin_s
    if group.rank == 0:
        _logger.info("compiled before the first stage: %.1f s", seconds)
    return seconds
