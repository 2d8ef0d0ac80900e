"""The disk cache of kernels that call each other across files."""

import shutil
import subprocess
import sys
from pathlib import Path

from foremoe.solvers import kernels

COMPILED = Path(kernels.__file__).parent / "compiled.py"


def test_an_edited_callee_is_compiled_into_its_callers(tmp_path):
    """Numba alone would go on running the callee that the caller was compiled with."""
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(COMPILED, folder / "compiled.py")
    (folder / "__init__.py").write_text("")
    (folder / "outer.py").write_text(
        "from folder.compiled import kernel\nfrom folder.inner import inner\n\n\n@kernel\ndef outer(x):\n    return inner(x)\n"
    )

    def result(inner):
        (folder / "inner.py").write_text(f"from folder.compiled import kernel\n\n\n@kernel\ndef inner(x):\n    return {inner}\n")
        command = [sys.executable, "-c", "from folder.outer import outer; print(outer(3))"]
        return int(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout)

    assert result("x + 100") == 103
    assert result("x * 1000") == 3000
