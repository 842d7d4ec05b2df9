"""Several processes that train together, as a launcher starts them, without importing torch anew.

A server imports everything once and forks the members of each group from itself:

    test  --"module function folder size argument"-->  server --fork--> member 0, member 1, ...
    test  <------------exit codes------------------

Each member calls `function(folder, argument)` and leaves what it returns in `folder/rank0.pt`, ...
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 240
"""A group that takes longer has a member that waits for one that will never come."""


def rank() -> int:
    """Number of this process in its group."""
    return int(os.environ.get("RANK", "0"))


class Groups:
    """Runs functions of a test module in groups of processes."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.server = server

    def run(
        self, function: Callable[[Path, Any], Any], folder: Path, *, size: int, argument: Any = None
    ) -> list[Any]:
        """What each member returned; AssertionError with their traces when one failed."""
        assert self.server.stdin is not None and self.server.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*"):
            old.unlink()
        order = [function.__module__, function.__name__, str(folder), size, argument]
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        traces = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))
        assert not any(codes), f"exit codes {codes}\n{traces}"
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


@contextmanager
def start_groups() -> Iterator[Groups]:
    """A server, until the end of the block."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.process_group"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Groups(server)
    finally:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.close()
        server.wait(timeout=60)
        server.stdout.close()


def serve() -> None:
    """The server: one group per line of stdin."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        module, name, folder, size, argument = json.loads(line)
        function = getattr(importlib.import_module(module), name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        members = [
            _fork(function, Path(folder), argument, rank, size, port) for rank in range(size)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(member, 0)[1]) for member in members]
        print(json.dumps(codes), flush=True)


def _fork(
    function: Callable[[Path, Any], Any],
    folder: Path,
    argument: Any,
    rank: int,
    size: int,
    port: str,
) -> int:
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    os.dup2(2, 1)  # stdout is for the test
    code = 1
    try:
        if size > 1:
            os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torch.save(function(folder, argument), folder / f"rank{rank}.pt")
        if size > 1:
            torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(f"member {rank}: {traceback.format_exc()}")
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
