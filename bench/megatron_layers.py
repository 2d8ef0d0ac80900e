"""Runs Megatron-LM's own unit tests of MoE layers with foremoe attached, on CPU ranks, and compares the results.

    python -m bench.megatron_layers --checkout ../Megatron-LM

The tests in tests/unit_tests/transformer/moe run unchanged on eight ranks. Every `MoELayer` that a test creates must give equal
results with and without foremoe, in the forward and in the backward pass, or must be refused when foremoe is attached. The
checkout brings its own megatron-core. Its package megatron.training needs six, regex and PyYAML, among others. This is a nightly
job. Without a checkout, it prints one line and succeeds.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

from bench.output import command_line, emit, hardware
from foremoe.testing.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "equal": "equal",
    "alone": "EP group of one rank",
    "refused": "refused",
    "does not run": "does not run on a CPU",
    "differs": "differs",
}
LIMIT_S = 3000.0


def main() -> None:
    """Compares the layers, prints what became of them, and ends with an error if one differs."""
    parser = command_line(__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--files", nargs="*", help="names of test files; default: all")
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    # Ranks look for modules where this process does.
    sys.path[:0] = [str(args.checkout.resolve()), str(ROOT / "tests" / "megatron")]
    import unit_test_layers  # type: ignore[import-not-found]  # tests/megatron

    folder = args.checkout / unit_test_layers.FOLDER
    if not folder.is_dir():
        print(f"megatron_layers: skipped, {args.checkout} is not a checkout of Megatron-LM with its tests")
        return
    files = args.files or sorted(path.name for path in folder.glob("test_*.py"))
    with RankPool(args.ranks) as pool:
        answers = pool.run(unit_test_layers.run_tests, str(args.checkout.resolve()), files, timeout_s=120.0, limit_s=LIMIT_S)
    tests = {test: _of_all_ranks([found[test].verdicts for found, _ in answers]) for test in answers[0][0]}
    ended = {test: found.ended for test, found in answers[0][0].items()}
    spread = {name: _worst([of[name] for _, of in answers]) for name in answers[0][1]}
    lines = ["# MoE layers of Megatron-LM's unit tests with foremoe attached", ""]
    lines += [f"{args.ranks} CPU ranks over gloo: {hardware()}.", ""]
    emit("\n".join(lines + _tests_table(tests) + _reasons(tests, ended) + _spread_table(spread)) + "\n", args.out)
    wrong = [f"{name}: {v.why}" for name, found in tests.items() for v in found if v.kind == "differs"]
    wrong += [f"{name}, one EP group: {v.why}" for name, v in spread.items() if v.kind == "differs"]
    if wrong or not any(v.kind == "equal" and v.replicas for v in spread.values()):
        sys.exit("\n".join(["layers differ, or nothing was replicated:", *wrong]))


def _of_all_ranks(verdicts: list[list[Any]]) -> list[Any]:
    return [_worst(of) for of in zip(*verdicts, strict=True)]


def _worst(of_ranks: Any) -> Any:
    """The verdict of the rank for which a layer went worst."""
    return max(of_ranks, key=lambda verdict: list(KINDS).index(verdict.kind))


def _tests_table(tests: dict[str, list[Any]]) -> list[str]:
    """Lines: layers of every test function by verdict."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for test, verdicts in tests.items():
        name = test.partition("[")[0].replace("::", ", ", 1)
        counts[name].update({"cases": 1, "none": int(not verdicts)})
        counts[name].update(verdict.kind for verdict in verdicts)
    lines = [
        "## As the tests lay them out",
        "",
        "Layers by verdict; a test function has several cases, and a case may build several.",
    ]
    lines += ["", f"| test | cases | build none here | {' | '.join(KINDS.values())} |", f"|{' --- |' * (len(KINDS) + 3)}"]
    total: collections.Counter[str] = sum(counts.values(), collections.Counter())
    for name, of in [*((name, of) for name, of in counts.items() if of["none"] < of["cases"]), ("all test functions", total)]:
        lines.append(f"| {name} | {of['cases']} | {of['none']} | {' | '.join(str(of[kind]) for kind in KINDS)} |")
    return [*lines, ""]


def _reasons(tests: dict[str, list[Any]], ended: dict[str, str]) -> list[str]:
    """Lines: what was said, and how often."""
    said = collections.Counter(
        f"{KINDS[v.kind]}: {v.why}" for of in tests.values() for v in of if v.kind not in ("equal", "alone")
    )
    said.update(f"no layer built: {ended[test] or 'the test has none'}" for test, of in tests.items() if not of)
    lines = ["| why | times |", "| --- | --- |", *(f"| {why} | {num} |" for why, num in said.most_common())]
    return [*lines, ""]


def _spread_table(spread: dict[str, Any]) -> list[str]:
    """Lines: every distinct layer over the ranks as one EP group."""
    lines = ["## Each distinct layer over one EP group", ""]
    lines += [
        "As many ranks as its experts allow, tensor and context parallel size 1; all-to-all where a test has the all-gather"
    ]
    lines += ["dispatcher. Options are those that are not Megatron's defaults.", ""]
    lines += ["| layer | verdict | replicas | skew at home | as served |", "| --- | --- | --- | --- | --- |"]
    for name, v in spread.items():
        verdict = KINDS[v.kind] + (f": {v.why}" if v.why else "")
        lines.append(f"| {name} | {verdict} | {v.replicas} | {v.skew_before:.3f} | {v.skew_served:.3f} |")
    return lines


if __name__ == "__main__":
    main()
