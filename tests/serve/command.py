"""`draftsmith live serve` on the shipped model, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).parents[2] / "models" / "mini-ende" / "target"
COMMAND = [sys.executable, "-m", "draftsmith", "live", "serve", "--target", str(MODEL)]
SECONDS = 120


class Running:
    """The command, from the moment on that its address is printed."""

    def __init__(self, *more: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "--dtype", "float32", "--port", "0", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        assert self.said, self.process.communicate()[1]
        self.url = self.said.split()[-1]
        self.port = int(self.url.split("/")[2].rsplit(":", 1)[1])

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, how: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(how)
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors
