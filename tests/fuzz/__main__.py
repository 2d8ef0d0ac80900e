"""``python -m tests.fuzz --inputs 1000000``: judges that many changed files, and fails on anything but a value or a sentence."""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from fuzz_loaders import LOADERS  # noqa: E402
from fuzz_run import input_of, report, run  # noqa: E402

from bench.output import emit, hardware  # noqa: E402

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--inputs", type=int, default=10_000)
parser.add_argument("--first", type=int, default=0, help="number of the first input")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no more inputs after that long")
parser.add_argument("--jobs", type=int, default=1)
parser.add_argument("--loader", choices=list(LOADERS))
parser.add_argument("--out", type=Path, help="write the figures to this markdown file")
parser.add_argument("--keep", type=Path, help="folder for inputs that ended in foreign exceptions or kills")
args = parser.parse_args()
about = (
    f"Measured on: {hardware()}. Command: `python -m tests.fuzz --inputs {args.inputs} --seed {args.seed} --jobs {args.jobs}`."
)
figures = run(args.inputs, args.seed, args.jobs, args.loader, args.first, seconds=args.seconds)
emit(f"# Changed files\n\n{about}\n\n{report(figures)}\n", args.out)
for number, *_ in [*figures["foreign"], *figures["kills"]] if args.keep else ():
    name, data = input_of(args.seed, number, args.loader)
    (args.keep / f"{name.replace(' ', '_')}-{args.seed}-{number}").write_bytes(data)
sys.exit(bool(figures["foreign"] or figures["kills"]))
