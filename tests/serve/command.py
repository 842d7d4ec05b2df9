"""`draftsmith live serve` on the shipped model, in a process of its own."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.forks import Forks

MODEL = Path(__file__).parents[2] / "models" / "mini-ende" / "target"
SECONDS = 120


class Running:
    """The command, from the moment on that its address is printed."""

    def __init__(self, forks: Forks, *more: str) -> None:
        fixed = ["--target", MODEL, "--dtype", "float32", "--port", "0"]
        self.process = forks.command("live", "serve", *fixed, *more)
        self.said = self.process.stdout.readline()
        assert self.said, self.process.communicate()[1]
        self.url = self.said.split()[-1]
        self.port = int(self.url.split("/")[2].rsplit(":", 1)[1])

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def end(self, how: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.wait(), errors
