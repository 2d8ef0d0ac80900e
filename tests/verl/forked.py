"""Programs in processes forked from one that has imported what veRL imports of others, eight CPU seconds each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback

LIMIT_S = 300


def serve():
    """Runs what it reads, one program after the other, and prints exit codes and what was written to stderr."""
    import numba  # noqa: F401
    import ray  # noqa: F401
    import tensordict  # noqa: F401
    import transformers  # noqa: F401

    for line in sys.stdin:
        environment, program = json.loads(line)
        with tempfile.TemporaryFile("w+") as said, open(os.devnull, "w") as nowhere:
            pid = os.fork()
            if pid == 0:
                signal.alarm(LIMIT_S)
                os.dup2(nowhere.fileno(), 1)
                os.dup2(said.fileno(), 2)
                os.environ.update(environment)
                run(program)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            said.seek(0)
            print(json.dumps((code, said.read())), flush=True)


def run(program):
    """Runs a program and ends the process."""
    code = 1
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def forks():
    """Gives a function of a program and its environment: its exit code and what it wrote to stderr."""
    with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(program, environment=None):
            server.stdin.write(json.dumps((environment or {}, program)) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


if __name__ == "__main__":
    serve()
