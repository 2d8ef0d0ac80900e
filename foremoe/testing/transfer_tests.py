"""Conformance suite for transfer backends. Subclass it in a test file and set the backend. pytest then checks the laws.

::

    class TestMine(foremoe.testing.TransferTests):
        backend = Mine()

Ranks are processes on this machine or, with ``in_process = True``, threads. If a test fails, it prints the copies of the case,
the number of wrong bytes, and the copy that should have written them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foremoe.testing import transfer_drills as drills
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.testing.transfer_cases import DTYPES, Op, Round, TransferCase, run_case
from foremoe.transfer.backends import resolve_backend
from foremoe.transfer.base import TransferBackend

# Letters: G ranks, L layers, E experts.

# Every example is a message to several processes, so there are fewer examples than for other laws.
law = settings(
    deadline=None, max_examples=max(25, settings().max_examples // 4), suppress_health_check=list(HealthCheck)
)  # fmt: skip
corner = settings(law, max_examples=max(10, law.max_examples // 3))


@st.composite
def random_cases(
    draw: st.DrawFn, ranks: tuple[int, ...] = (1, 2, 3, 4), two_sided: bool = True, dtypes: tuple[str, ...] = DTYPES
) -> TransferCase:
    """Draws cases with copies that a plan may contain: weights from homes to buffers and, if `two_sided`, gradients back."""
    num_ranks = draw(st.sampled_from(ranks))
    home_rank = st.integers(0, num_ranks - 1)
    home_LE = draw(st.lists(st.lists(home_rank, min_size=1, max_size=4).map(tuple), min_size=1, max_size=2).map(tuple))
    num_buffers = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 64, 1000]), min_size=1, max_size=3).map(tuple))
    # Keys are any numbers below 2**31 - 1, in any order.
    keys = iter(np.random.default_rng(draw(st.integers(0, 2**32 - 1))).choice(2**31 - 1, 200, replace=False).tolist())
    rounds = []
    for _ in range(draw(st.integers(1, 3))):
        ops = []
        for g in range(num_ranks):
            others = [(x, e) for x, home_E in enumerate(home_LE) for e, home in enumerate(home_E) if home != g]
            for b in range(num_buffers):
                expert = draw(st.sampled_from([None, *others]))
                if expert is not None:
                    ops.append(Op(next(keys), *expert, g, b))
        for x, home_E in enumerate(home_LE) if two_sided else ():
            for e, home in enumerate(home_E):
                slots = [(g, b) for g in range(num_ranks) if g != home for b in range(num_buffers)]
                slot = draw(st.sampled_from([None, *slots]))
                if slot is not None:
                    ops.append(Op(next(keys), x, e, *slot, gradient=True))
        batches: list[list[Op]] = [[] for _ in range(draw(st.integers(1, 4)))]
        for op in draw(st.permutations(ops)):
            batches[draw(st.integers(0, len(batches) - 1))].append(op)
        rounds.append(Round(tuple(map(tuple, batches)), new_weights=draw(st.booleans())))
    return TransferCase(
        num_ranks, home_LE, num_buffers, draw(st.sampled_from(dtypes)), sizes, tuple(rounds), draw(st.integers(0, 2**16))
    )  # fmt: skip


class TransferTests:
    """Tests of the laws of `TransferBackend`.

    Copies must write the correct bytes and nothing else, with any order of waits. Failures must be clean, and resources must be
    released.

    Attributes:
        backend: Backend to test, as a name that `resolve_backend` knows or as an instance, which is copied for every rank.
        in_process: Whether ranks are threads, with a `ThreadGroup`. If False, they are processes, with a `TorchGroup` over gloo.
        ranks: Numbers of ranks to run the tests with. At least one must be above 1.
        device: Device whose memory is used. Defaults to the GPU if there is one. All ranks use the same GPU.
        timeout_s: Timeout in seconds of waits that should succeed.
    """

    backend: ClassVar[TransferBackend | str]
    in_process: ClassVar[bool] = False
    ranks: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    device: ClassVar[str | None] = None
    timeout_s: ClassVar[float] = 20.0

    @pytest.fixture(autouse=True)
    def _needs_its_modules(self) -> None:
        for name in () if isinstance(self.backend, str) else self.backend.requires:
            pytest.importorskip(name, reason=f"{self.backend!r} needs {name}")

    def on_ranks(self, fn: Callable[..., list[str]], num_ranks: int, *args: Any) -> None:
        """Calls ``fn(group, backend, *args, device, timeout_s)`` on every rank. It returns the errors of the backend."""
        __tracebackhide__ = True
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        call = (fn, self.backend, *args, device, self.timeout_s)
        if self.in_process:
            found = run_threads(drills.on_a_copy, num_ranks, *call)
        else:
            found = get_pool(max(self.ranks)).run(drills.on_a_copy, *call, num_ranks=num_ranks)
        wrong = [text for texts in found for text in texts]
        assert not wrong, f"{self.backend!r} breaks a law:\n" + "\n".join(wrong)

    def drill(self, fn: Callable[..., list[str]], one_sided: bool | None = None) -> None:
        """Runs a drill on the smallest possible group if the drill applies to this kind of backend."""
        __tracebackhide__ = True
        if one_sided is not None and self.one_sided != one_sided:
            pytest.skip(f"{self.backend!r} is {'one' if self.one_sided else 'two'}-sided")
        self.on_ranks(fn, self.few_ranks)

    @property
    def few_ranks(self) -> int:
        """Smallest of the numbers in `ranks` that is above 1, so that there are copies between ranks."""
        return min(num for num in self.ranks if num > 1)

    @property
    def one_sided(self) -> bool:
        """Returns True if the backend is one-sided, so that destinations pull weights without help from the source."""
        return resolve_backend(self.backend).one_sided

    def cases(self, **options: Any) -> st.SearchStrategy[TransferCase]:
        """Draws cases that the backend supports."""
        return random_cases(**{"ranks": self.ranks, "two_sided": not self.one_sided, "dtypes": self.dtypes, **options})

    @law
    @given(st.data())
    def test_every_byte_arrives_and_no_other_is_written(self, data: st.DataObject) -> None:
        self._run(data.draw(self.cases()))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype_travels_bit_for_bit(self, dtype: str) -> None:
        if dtype not in self.dtypes:
            pytest.skip(f"{self.backend!r} does not claim {dtype}")
        self._run_drill(dtype=dtype, sizes=(1, 0, 97), rounds=drills.DRILL.rounds * 2, seed=3)

    @corner
    @given(st.data())
    def test_large_experts_arrive(self, data: st.DataObject) -> None:
        sizes = data.draw(st.sampled_from([(300_000,), (1, 100_001, 0, 65_536)]))
        self._run_drill(dtype="float32", sizes=sizes, rounds=drills.DRILL.rounds * 2, seed=1)

    def test_no_copies_at_all(self) -> None:
        for num_ranks in self.ranks:
            self._run(TransferCase(num_ranks, ((0,),), 1, "float32", (4,), (Round(((), ())), Round(())), 0))

    def test_experts_without_elements(self) -> None:
        self._run_drill(dtype="float32", sizes=(0, 0))

    def test_a_slow_peer_is_waited_for(self) -> None:
        self.drill(drills.slow_peer)

    def test_a_source_is_free_once_it_has_waited_itself(self) -> None:
        self.drill(drills.early_source, one_sided=False)

    def test_a_silent_peer_is_named(self) -> None:
        self.drill(drills.silent_peer, one_sided=False)

    def test_pulls_need_no_help_of_the_home(self) -> None:
        self.drill(drills.no_help, one_sided=True)

    def test_pulls_see_the_weights_of_the_last_publish(self) -> None:
        self.drill(drills.publish_again, one_sided=True)

    def test_weights_of_an_older_version_are_stale(self) -> None:
        self.drill(drills.pull_stale, one_sided=True)

    def test_weights_that_were_never_published_are_an_error(self) -> None:
        self.drill(drills.pull_unpublished, one_sided=True)

    def test_close_is_safe_at_any_time(self) -> None:
        self.drill(drills.close_in_flight)

    def test_opening_and_closing_leaves_nothing(self) -> None:
        self.drill(drills.cycles)

    def _run(self, case: TransferCase) -> None:
        __tracebackhide__ = True
        try:
            self.on_ranks(run_case, case.num_ranks, case)
        except Exception as error:
            error.add_note(str(case))
            raise

    def _run_drill(self, **changes: Any) -> None:
        __tracebackhide__ = True
        self._run(dataclasses.replace(drills.DRILL, num_ranks=self.few_ranks, **changes))
