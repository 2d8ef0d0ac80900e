"""Known vulnerabilities in the versions that .venv holds, of the core, its extras and what tests them: `make audit`."""

from __future__ import annotations

import json
import subprocess
import sysconfig

from environments import ROOT, environment, say

STAGE = "audit"
FOLDER = ROOT / ".venv-audit"
AUDITED = sysconfig.get_path("purelib", vars={"base": str(ROOT / ".venv")})


def audited(output: str) -> tuple[int, list[str]]:
    """Number of packages that pip-audit could look up, by the JSON that it printed, and a line for each vulnerability."""
    if not output:  # it ended with an error of its own: nothing answered
        return 0, []
    # pip came with Python: nothing of ours needs it.
    known = [package for package in json.loads(output)["dependencies"] if "vulns" in package and package["name"] != "pip"]
    return len(known), [
        f"{package['name']} {package['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no version'}"
        for package in known
        for fault in package["vulns"]
    ]


def main() -> int:
    """Audits; returns the exit code."""
    python = environment(STAGE, FOLDER, ["pip-audit==2.9.0"])
    if python is None:
        return 0
    command = [python, "-m", "pip_audit", "--path", AUDITED, "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
    done = subprocess.run(command, capture_output=True, text=True)
    num_packages, faults = audited(done.stdout)
    if not num_packages:
        say(STAGE, "skipped, the service that knows vulnerabilities cannot be reached")
        return 0
    for fault in faults:
        say(STAGE, fault)
    say(STAGE, f"{num_packages} packages have {len(faults)} known vulnerabilities")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
