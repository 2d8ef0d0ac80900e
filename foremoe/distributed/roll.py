"""Roll: what the ranks of a group say of themselves in the store that links them: who has come, who failed, who is alive."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore

from foremoe.base.errors import TransferError, first_line

# Letters: G ranks.

_LOOK_S = 1.0  # between two looks for reports
_ANSWER_S = 2.0  # a rank that is alive also waits, and looks up sooner


class Roll:
    """The roll of one group on one rank. Only `meet` is collective.

    Args:
        store: Of this group alone.
        rank: This rank.
        size: Number of ranks.
    """

    def __init__(self, store: PrefixStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._num_parts = 0

    def meet(self, timeout_s: float) -> PrefixStore:
        """A new part of the store, once all ranks have come for it; all come in the same order.

        Who makes a communicator there need not wait for a rank that will not come.

        Raises:
            TransferError: A rank did not come within `timeout_s`, or reported a failure. It names the rank, and is reported.
        """
        self._num_parts += 1
        part = PrefixStore(f"private/{self._num_parts}", self.store)
        here_G = [f"here/{g}" for g in range(self.size)]
        begin = looked = time.monotonic()
        pause_s = 0.001
        try:
            part.set(here_G[self.rank], "")
            while not part.check(here_G):
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked, reports = now, self.reports() if self.reported() else {}
                    if reports:
                        raise ended_by(reports)
                if now - begin > timeout_s:
                    late = [g for g in range(self.size) if not part.check([here_G[g]])]
                    error = silent(late, "come to set up the group", timeout_s)
                    self.report(str(error))  # others came later, and would wait for them as long
                    raise error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
        except TransferError:
            raise
        except Exception as error:
            raise _gone("set up their group", error) from error
        return part

    def report(self, message: str) -> None:
        """Leaves word that this rank ends the step; never raises."""
        try:
            self.store.set(f"report/{self.rank}", message)
            self.store.set("reported", "")
        except Exception:  # the store went with its host: nobody is left to read it
            return

    def reported(self) -> bool:
        """True if a rank has left word."""
        try:
            return bool(self.store.check(["reported"]))
        except Exception:  # the store is gone; the exchange itself will fail or time out
            return False

    def reports(self) -> dict[int, str]:
        """What ranks have reported."""
        return {g: self.store.get(f"report/{g}").decode() for g in range(self.size) if self.store.check([f"report/{g}"])}

    def blame(self, verb: str, waited_s: float | None, error: Exception) -> TransferError:
        """The error of a failed exchange: by the reports of other ranks, or by who does not show up within two seconds.

        `waited_s` is None where the exchange ended before its limit.
        """
        mute = set(range(self.size)) - {self.rank}
        reported: dict[int, str] = {}
        try:
            self.store.set(f"alive/{self.rank}", "")
            until = time.monotonic() + _ANSWER_S
            while mute and time.monotonic() < until:
                reported = self.reports()
                mute = {g for g in mute if g not in reported and not self.store.check([f"alive/{g}"])}
                time.sleep(0.02)
        except Exception:
            return _gone(verb, error)
        reported.pop(self.rank, None)
        return ended_by(reported) if reported else silent(tuple(sorted(mute)), verb, waited_s, reason(error))


def ended_by(reports: dict[int, str]) -> TransferError:
    """The error on the ranks that others have ended."""
    ranks = tuple(sorted(reports))
    why = "; ".join(f"rank {g}: {reports[g]}" for g in ranks)
    return TransferError(f"the step was ended by another rank ({why})", ranks)


def silent(ranks: Sequence[int], verb: str, waited_s: float | None, why: str = "") -> TransferError:
    """The error on the ranks that have waited for these, if it is known for which; None: a connection broke before the limit."""
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    lack = f"broke off and did not {verb}" if waited_s is None else f"did not {verb} within {waited_s:.1f} s"
    lack += f" ({why})" if why else ""
    return TransferError(f"{who} {lack}; look at its log and restart the step.", tuple(ranks))


def reason(error: Exception) -> str:
    """What torch says of a failed exchange, without the place in its source and its advice."""
    return re.sub(r"^\[\S*\] ", "", first_line(error)).partition(". ")[0]


def timed_out(error: Exception) -> bool:
    """True if torch says so: it counts whole milliseconds, and may be done a few before the limit that it was given."""
    return re.search("tim(ed |e)out", str(error), re.IGNORECASE) is not None


def _gone(verb: str, error: Exception) -> TransferError:
    return TransferError(f"the ranks cannot {verb} and the store that links them is gone ({reason(error)}); restart them.")
