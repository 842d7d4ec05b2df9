"""Processes that start at once: a server has everything imported and forks them from itself.

    test  --function, arguments, files-->  server  --fork-->  function(*arguments)
    test  <--------- its id, later how it ended ----------

Importing torch and the package takes seconds of each process that does it anew.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SECONDS = 240
"""A process that takes longer waits for something that will never come."""


class Child:
    """A process that the server has forked; it looks like one of `subprocess`."""

    def __init__(self, server: socket.socket, order: dict[str, Any]) -> None:
        self.returncode: int | None = None
        self._server = server
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed by `__exit__`
        out, out_write = os.pipe()
        self._alive, alive_write = os.pipe()  # held open by the process until it ends
        self.stdout = os.fdopen(out)
        given = [out_write, self._stderr.fileno(), alive_write]
        socket.send_fds(server, [json.dumps(order).encode() + b"\n"], given)
        self.pid = int(self._answer())
        os.close(out_write)
        os.close(alive_write)

    def _answer(self) -> bytes:
        found = b""
        while not found.endswith(b"\n"):
            more = self._server.recv(64)
            assert more, "the server is gone"
            found += more
        return found

    def ended(self, seconds: float = 0) -> bool:
        """Wait for its end no longer than this."""
        return bool(select.select([self._alive], [], [], seconds)[0])

    def poll(self) -> int | None:
        return self.wait() if self.ended() else None

    def wait(self, timeout: float = SECONDS) -> int:
        """Its exit status, as `subprocess` gives it."""
        if self.returncode is None:
            assert self.ended(timeout), f"process {self.pid} has not ended in {timeout} seconds"
            self._server.sendall(json.dumps({"wait": self.pid}).encode() + b"\n")
            self.returncode = int(self._answer())
            os.close(self._alive)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # not yet waited for: the id is still its own

    def kill(self) -> int:
        """Kill it, and wait for its end."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
        return self.wait()

    def communicate(self, timeout: float = SECONDS) -> tuple[str, str]:
        """What it wrote to stdout and stderr up to its end."""
        out = self.stdout.read()
        self.wait(timeout)
        return out, self.errors()

    def errors(self) -> str:
        """What it has written to stderr."""
        self._stderr.seek(0)
        return self._stderr.read().decode()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *reason: object) -> None:
        self.kill()
        self.stdout.close()
        self._stderr.close()


class Forks:
    """Starts functions of test modules, and commands, as processes."""

    def __init__(self, server: socket.socket) -> None:
        self.server = server

    def start(self, function: Callable[..., object], *arguments: Any, **variables: str) -> Child:
        """`function(*arguments)` in a process; arguments are JSON, or paths."""
        order = {"module": function.__module__, "function": function.__name__}
        given = [str(one) if isinstance(one, Path) else one for one in arguments]
        return Child(self.server, {**order, "arguments": given, "variables": variables})

    def command(self, *words: object, folder: Path | None = None, **variables: str) -> Child:
        """`draftsmith WORDS`."""
        place = str(folder or Path.cwd())
        return self.start(a_command, place, [str(word) for word in words], **variables)

    def group(
        self, function: Callable[[Path, Any], Any], folder: Path, *, size: int, argument: Any = None
    ) -> list[Any]:
        """What `function(folder, argument)` returns in each process of a group that trains
        together; AssertionError with their traces when one failed."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank*"):
            old.unlink()
        member = [function.__module__, function.__name__, str(folder), argument]
        places = group_of(size) if size > 1 else [{}]
        members = [self.start(a_member, *member, rank, **p) for rank, p in enumerate(places)]
        codes = [one.wait() for one in members]
        traces = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))
        assert not any(codes), f"exit codes {codes}\n{traces}"
        return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


def group_of(size: int) -> list[dict[str, str]]:
    """The variables of each process of a group, as a launcher sets them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def rank() -> int:
    """Number of this process in its group."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def start_forks() -> Iterator[Forks]:
    """A server, until the end of the block."""
    path = os.pathsep.join([str(ROOT), *sys.path])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        theirs.close()
        try:
            yield Forks(ours)
        finally:
            ours.close()
            server.wait(timeout=60)


# --------------------------------------------------------------------------- in the server

PRELOADED = """
    pandas pyarrow.parquet pydantic.type_adapter pytest scipy.stats safetensors.torch
    torch.distributed.fsdp transformers.models.llama.modeling_llama
    draftsmith.commands.bench draftsmith.commands.distill draftsmith.commands.pretrain
    draftsmith.distill.trajectories.store draftsmith.distill.trainer draftsmith.drafters.independent
    draftsmith.targets.hf draftsmith.commands.live.serve draftsmith.serve.app uvicorn
""".split()


def serve(control: socket.socket) -> None:
    """Fork a process per line, or tell how one ended."""
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    while True:
        line, files, _, _ = socket.recv_fds(control, 65536, 3)
        while line and not line.endswith(b"\n"):
            line += control.recv(65536)
        if not line:
            return
        order = json.loads(line)
        if "wait" in order:
            code = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
            control.sendall(b"%d\n" % code)
            continue
        function = getattr(importlib.import_module(order["module"]), order["function"])
        gc.collect()
        gc.freeze()  # else the first collection in a child would copy all pages
        child = os.fork()
        if child == 0:
            control.close()
            run(function, order, *files)
        for file in files:
            os.close(file)
        control.sendall(b"%d\n" % child)


def run(function: Callable[..., object], order: dict[str, Any], out: int, err: int, _: int) -> None:
    """Become the process: end as a program would whose `main` is the function."""
    signal.alarm(SECONDS)
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.environ |= order["variables"]
    function(*order["arguments"])
    sys.exit()


def a_command(folder: str, words: list[str]) -> None:
    from draftsmith import cli

    os.chdir(folder)
    sys.argv = ["draftsmith", *words]
    cli.main()


def a_member(module: str, name: str, folder: str, argument: Any, number: int) -> None:
    """A process of a group: it leaves what its function returns in `rank0.pt`, ..."""
    code = 1
    try:
        function = getattr(importlib.import_module(module), name)
        torch.save(function(Path(folder), argument), Path(folder) / f"rank{number}.pt")
        if "WORLD_SIZE" in os.environ:
            torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        text = f"member {number}: {traceback.format_exc()}"
        (Path(folder) / f"rank{number}.txt").write_text(text)
    finally:
        os._exit(code)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        serve(socket.socket(fileno=int(sys.argv[1])))
