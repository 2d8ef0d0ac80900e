"""Builds sdist and wheel into dist/ and tries the wheel in a fresh environment, outside the checkout: `make dist`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from environments import ROOT, environment, lowest, requirements, say

STAGE = "dist"
TOOLS = ROOT / ".venv-dist"
CASE = ["--synthetic", "gpt-oss-20b", "--layers", "0:2", "--micro-steps", "2", "--ranks", "8", "--tokens-per-rank", "256"]
TINY = ["--synthetic", "gpt-oss-20b", "--layers", "0:1", "--micro-steps", "1", "--ranks", "4", "--tokens-per-rank", "64"]
TINY += ["--planner", "quota"]  # few kernels
PLAIN_PAGE = ["--planners", "none"]
OBEY = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
IMPORTS = """
import importlib, io, logging
import foremoe
told = io.StringIO()
logging.basicConfig(stream=told)
for name in ("solvers", "planner", "simulate", "report", "cli.main"):
    importlib.import_module(f"foremoe.{name}")
print(foremoe.__file__, told.getvalue().count("NUMBA_CACHE_DIR"))
"""


def main() -> int:
    """Builds, compares, installs and runs; returns the exit code, or raises SystemExit with what is wrong."""
    # The oldest setuptools allowed; `pip install` takes the newest.
    tools = environment(STAGE, TOOLS, ["build", "wheel", *lowest(requirements("build"))])
    if tools is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="foremoe-dist-") as name:
        folder = Path(name).resolve()
        source, files = copy_tree(folder / "source")
        say(STAGE, f"building sdist and wheel of {len(files)} files")
        sdist, wheel = build(tools, source, folder / "dist")
        check_sdist(sdist, files)
        check_wheel(wheel, source, files)
        _, direct = build(tools, source, folder / "direct", "--wheel")
        if members(direct) != members(wheel):
            raise SystemExit(f"{STAGE}: the sdist builds another wheel than the checkout; see MANIFEST.in.")
        if not try_wheel(wheel, folder):
            return 0
        (ROOT / "dist").mkdir(exist_ok=True)
        for made in (sdist, wheel):
            shutil.copy(made, ROOT / "dist")
            say(STAGE, f"dist/{made.name}, {made.stat().st_size / 1000:.0f} kB")
    return 0


def copy_tree(target: Path) -> tuple[Path, list[str]]:
    """A copy of the files that git knows or would add: what lies about in ignored folders gets into no package."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target, files


def build(python: Path, source: Path, out: Path, *options: str) -> tuple[Path, Path]:
    """Builds the sdist, and from it the wheel; or with ``--wheel`` the wheel alone, from the tree."""
    command = [python, "-m", "build", "--no-isolation", *options, "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, text=True, env=outside())
    if done.returncode:
        raise SystemExit(f"{STAGE}: building failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (wheel,) = out.glob("*.whl")
    return next(out.glob("*.tar.gz"), wheel), wheel


def members(wheel: Path) -> dict[str, bytes]:
    """Files of a wheel and their bytes; but for the list of them, whose order may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def check_wheel(wheel: Path, source: Path, files: list[str]) -> None:
    """The wheel holds the package as it stands in the tree, its metadata and licence, and nothing else."""
    found = members(wheel)
    package = {name: (source / name).read_bytes() for name in files if name.startswith("foremoe/")}
    inside = {name: data for name, data in found.items() if name.startswith("foremoe/")}
    if wrong := sorted(name for name in package | inside if package.get(name) != inside.get(name)):
        raise SystemExit(f"{STAGE}: the wheel differs from the tree in {', '.join(wrong)}; see package-data in pyproject.toml.")
    others = {name.split("/")[0] for name in found} - {"foremoe"}
    if len(others) != 1 or not (info := others.pop()).endswith(".dist-info"):
        raise SystemExit(f"{STAGE}: beside the package the wheel holds {', '.join(sorted(others))}.")
    if not any(name.startswith(info) and name.endswith("/LICENSE") for name in found):
        raise SystemExit(f"{STAGE}: the wheel holds no licence.")


def check_sdist(sdist: Path, files: list[str]) -> None:
    """The sdist holds the package and what building needs; tests, benches and docs are in the repository."""
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in files if name.startswith("foremoe/")} | {"pyproject.toml", "README.md", "LICENSE"}
    if absent := sorted(wanted - found):
        raise SystemExit(f"{STAGE}: the sdist lacks {', '.join(absent)}.")
    if extra := sorted(name for name in found if name.startswith(("tests/", "bench/", "docs/", "examples/"))):
        raise SystemExit(f"{STAGE}: the sdist holds {', '.join(extra)}; see MANIFEST.in.")


def try_wheel(wheel: Path, folder: Path) -> bool:
    """Installs the wheel in a fresh environment and runs it from another folder; False, after a line, without a registry."""
    python = environment(STAGE, folder / "venv", requirements("core"))
    if python is None:
        return False
    for name in ("elsewhere", "home", "tmp"):
        (folder / name).mkdir()
    # Without a registry: what the wheel says that it needs must be there by now.
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", str(wheel)]
    run(folder, *pip)
    foremoe = str(python.parent / "foremoe")
    # All that the package holds, without the compiler, whose minute tells nothing about the package.
    say(STAGE, "planning and writing a report from another folder, without the compiler")
    plain = {"NUMBA_DISABLE_JIT": "1"}
    run(folder, foremoe, "--version")
    run(folder, foremoe, "plan", *CASE, "-o", "plan.safetensors", **plain)
    run(folder, foremoe, "check", "plan.safetensors", **plain)
    run(folder, foremoe, "report", *CASE, *PLAIN_PAGE, "--plan", "plan.safetensors", "-o", "report.html", **plain)
    say(STAGE, "planning with the compiler; importing where nothing can be written")
    run(folder, foremoe, "plan", *TINY, "-o", "plain.safetensors", **plain)
    run(folder, foremoe, "plan", *TINY, "-o", "compiled.safetensors")
    if (folder / "elsewhere/plain.safetensors").read_bytes() != (folder / "elsewhere/compiled.safetensors").read_bytes():
        raise SystemExit(f"{STAGE}: NUMBA_DISABLE_JIT=1 makes another plan.")
    if not list(folder.glob("venv/lib/python*/site-packages/foremoe/**/*.nbi")):
        raise SystemExit(f"{STAGE}: compiled code is not kept next to the package.")
    import_read_only(python, folder)
    return True


def import_read_only(python: Path, folder: Path) -> None:
    """Imports the installed package as a user who may write neither to it nor to a home: one warning names the cure."""
    obey = OBEY if os.getuid() == 0 else []  # for root permissions do not hold
    if obey and (not shutil.which(obey[0]) or subprocess.run([*obey, "true"], capture_output=True).returncode):
        say(STAGE, "root may write anywhere here: the read-only installation is not tried")
        return
    (package,) = folder.glob("venv/lib/python*/site-packages/foremoe")
    folders = [folder / "home", package, *(path for path in package.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        for options, warnings in (({}, "1"), ({"NUMBA_DISABLE_JIT": "1"}, "0")):
            told = run(folder, *obey, str(python), "-c", IMPORTS, **options).split()
            if told != [str(package / "__init__.py"), warnings]:
                raise SystemExit(f"{STAGE}: read-only, importing {package} gave {' '.join(told)}, not {warnings} warning.")
    finally:
        for path in folders:
            path.chmod(0o755)


def run(folder: Path, *command: str, **variables: str) -> str:
    """What a command prints that runs in an empty folder, home and temporary folder; raises SystemExit where it fails."""
    here = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    done = subprocess.run(command, cwd=folder / "elsewhere", env=outside() | here | variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{STAGE}: {' '.join(command)} ended with {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def outside() -> dict[str, str]:
    """The environment without what could lead to the checkout or to kernels compiled before."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "NUMBA_", "XDG_", "VIRTUAL_ENV"))}


if __name__ == "__main__":
    raise SystemExit(main())
