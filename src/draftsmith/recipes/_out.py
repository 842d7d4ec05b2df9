"""Where a command writes to."""

from __future__ import annotations

from pathlib import Path

from draftsmith.errors import InputError


def refuse_file(out: Path) -> None:
    """InputError where a file stands in place of the folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder.")
