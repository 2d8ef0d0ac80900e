"""Rows whose replicas cannot be had run at home on all ranks, with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from stage_util import Case, expected_counts, run_case, run_dense, worst
from test_equality import TOLERANCE, busy_cases

from foremoe.base.errors import TransferError
from foremoe.plan.transfers import Link
from foremoe.testing.ranks import run_threads
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.local import Local


class Pulls(TransferBackend):
    """One-sided: ranks that are threads read each other's homes; on some ranks every pull fails."""

    links = frozenset({Link.PEER, Link.RDMA})
    one_sided = True

    def __init__(self, broken: frozenset[int]) -> None:
        self.broken = broken

    def open(self, rank: int, group: Any, buffers: Any) -> None:
        self._banks, self._rank = group.gather(buffers), rank

    def start(self, copies: Any) -> Any:
        return copies

    def wait(self, handle: Any, timeout_s: float) -> None:
        if self._rank in self.broken:
            raise TransferError("the link is down")
        for copy in handle:
            for dst, src in zip(copy.dst, self._banks[copy.src_rank].home(copy.layer, copy.expert), strict=True):
                dst.copy_(src)

    def close(self) -> None:
        pass


@pytest.mark.heavy
@given(busy_cases(unplanned=0.05), st.data())
@examples(25)
def test_rows_that_lack_a_replica_run_at_home_and_compute_the_same(case: Case, data: st.DataObject) -> None:
    plan = case.plan
    assume(plan.num_replicas)
    broken = frozenset(data.draw(st.sets(st.integers(0, plan.G - 1), min_size=1)))
    ranks = run_threads(run_case, plan.G, case, lambda rank: [Pulls(broken), Local()])
    assert worst(ranks, run_dense(case)) < TOLERANCE
    lacking_ML = (plan.quota_MLGS[:, :, sorted(broken), plan.B :] > 0).any(axis=(2, 3))
    served_MLGS, drift_MLG = expected_counts(case)
    rank_LE, slot_LE = np.divmod(plan.home_LE, plan.B)
    for m, layer in np.argwhere(lacking_ML):
        served_MLGS[m, layer] = 0
        for source in range(plan.G):
            occurs_E = np.bincount(case.topk[m, layer, source].numpy().ravel(), minlength=plan.E)
            np.add.at(served_MLGS[m, layer], (rank_LE[layer], slot_LE[layer]), occurs_E)
    for g, (_, _, report) in enumerate(ranks):
        assert set(report.fell_back) == set(map(tuple, np.argwhere(lacking_ML).tolist()))
        assert report.timeline is not None and report.timeline.fell_back == report.fell_back
        assert (report.served_MLS == served_MLGS[:, :, g]).all()
        assert (report.drift_ML == drift_MLG[:, :, g]).all()
