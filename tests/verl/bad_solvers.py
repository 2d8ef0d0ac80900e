"""Solvers that misbehave on one rank: what a stage must survive."""

import dataclasses
import time
from dataclasses import dataclass

import torch.distributed as dist

from foremoe.levels import RankSolver
from foremoe.solvers import Search


@dataclass(frozen=True)
class Raises(RankSolver):
    def solve(self, problem, start):
        if dist.get_rank() == 0:
            raise ValueError("made to fail")
        return Search().solve(problem, start)


@dataclass(frozen=True)
class Sleeps(RankSolver):
    def solve(self, problem, start):
        if dist.get_rank() == 1:
            time.sleep(8.0)
        return Search().solve(problem, start)


@dataclass(frozen=True)
class Quits(RankSolver):
    def solve(self, problem, start):
        if dist.get_rank() == 1:
            raise SystemExit("made to quit")
        return Search().solve(problem, start)


@dataclass(frozen=True)
class Invalid(RankSolver):
    """Serves a token that nobody sent."""

    def solve(self, problem, start):
        placement = Search().solve(problem, start)
        quota_NGS = placement.quota_NGS.copy()
        quota_NGS[0, 0, 0] += 1
        return dataclasses.replace(placement, quota_NGS=quota_NGS)
