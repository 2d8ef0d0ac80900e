"""Process groups for drills in which the failing process hosts the store that links the ranks.

The store is hosted by a rank, by a rank behind a link that is cut, or by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from foremoe.distributed.group import TorchGroup
from foremoe.distributed.launch import start_ranks


class Link:
    """A relay on the way to a port, which can be cut: what it got is gone, and its connections stay open.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, port: int) -> None:
        self._to, self._cut = port, threading.Event()
        self._kept: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing passes from here on."""
        self._cut.set()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = self._connected()
            self._kept += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _connected(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._to))
            except OSError:  # nobody listens yet
                time.sleep(0.05)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if not self._cut.is_set():
                    target.sendall(data)


def hosted_by_rank_0(group: TorchGroup, timeout_s: float) -> tuple[dist.ProcessGroup, Callable[[], None]]:
    """Makes a new process group of the same ranks. Rank 0 hosts its store, as under env://; the others reach it over a `Link`.

    Returns:
        The process group, and what cuts the link, for rank 0 to call.
    """
    ports = (0, 0)
    if group.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        link = Link(port)
        ports = port, link.port
    ports = group.gather(ports)[0]
    mine = ports[0 if group.rank == 0 else 1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(mine), "RANK": str(group.rank), "WORLD_SIZE": str(group.size)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    return dist.distributed_c10d._get_default_group(), link.cut if group.rank == 0 else lambda: None


def end_after(folder: Path, num_files: int) -> None:
    """Kills this process, be it stopped, once a folder has this many files; a process of its own sees to it."""
    wait = f"until [ $(ls '{folder}' | wc -l) -ge {num_files} ]; do sleep 0.2; done; kill -KILL {os.getpid()}"
    subprocess.Popen(["timeout", "600", "sh", "-c", wait], start_new_session=True)


def under_launcher(folder: Path, timeout_s: float, num_ranks: int = 2) -> list[dict[str, Any]]:
    """Stops torchrun's agent, which hosts the ranks' store, and returns each rank's error of setting up a group.

    Args:
        folder: Empty, for their answers.
        timeout_s: Limit of the group.
    """
    agent = multiprocessing.get_context("spawn").Process(
        target=start_ranks, args=(_launched, (str(folder), timeout_s), num_ranks, "drill")
    )
    agent.start()
    answers = [folder / str(g) for g in range(num_ranks)]
    until = time.monotonic() + 240.0
    while not all(answer.exists() for answer in answers) and time.monotonic() < until:
        time.sleep(0.2)
    agent.kill()
    agent.join()
    return [json.loads(answer.read_text()) for answer in answers]


def _launched(folder: str, timeout_s: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120.0))
    first = TorchGroup(timeout_s=120.0)
    first.barrier()
    found: dict[str, Any] = {"error": ""}
    if first.rank == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
    else:
        time.sleep(1.0)
    begin = time.monotonic()
    try:
        TorchGroup(timeout_s=timeout_s)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    found["seconds"] = time.monotonic() - begin
    draft = Path(folder) / f"draft {first.rank}"
    draft.write_text(json.dumps(found))
    draft.rename(Path(folder) / str(first.rank))
    sys.stdout.flush()
    os._exit(0)
