"""Runs a command line in this process, as a program would see it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from draftsmith import cli


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a command ended."""

    words: list[str]
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed under `--json`: one object and nothing else."""
        assert self.code == 0, f"{' '.join(self.words)}\n{self.err}"
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The line on stderr that says why it failed."""
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""


def run(words: str | list[str], *, folder: Path | None = None, stdin: str = "") -> Ended:
    """Run `draftsmith WORDS` with `folder` as the current one."""
    argv = words.split() if isinstance(words, str) else words
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        working_in(folder),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Ended(words=argv, code=code, out=out.getvalue(), err=err.getvalue())


@contextlib.contextmanager
def working_in(folder: Path | None) -> Iterator[None]:
    before = Path.cwd()
    if folder is not None:
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
