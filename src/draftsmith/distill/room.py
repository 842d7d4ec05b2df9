"""Whether there is room for files before they are written: in a budget, and on the disk."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from draftsmith.errors import BackendError, InputError


def check_room(folder: Path, size: int, max_bytes: int | None, what: str) -> None:
    """Raises InputError (the folder would grow over `max_bytes`) or BackendError (the disk).

    `what`: is to be written there, with its size.
    """
    used = 0 if max_bytes is None else _used(folder)
    if max_bytes is not None and used + size > max_bytes:
        raise InputError(
            f"{what} would make the store {folder} larger than {max_bytes:,} bytes ({used:,} are "
            "used); everything so far is kept: allow more and run the same command again to go on"
        )
    free = free_bytes(folder)
    if size > free:
        raise BackendError(
            f"{what} would fill the disk of the store {folder} ({free:,} bytes are free); "
            "everything so far is kept: make room and run the same command again to go on"
        )


def _used(folder: Path) -> int:
    used = 0
    if folder.is_dir():
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process's temporary file
                used += path.stat().st_size
    return used


def free_bytes(folder: Path) -> int:
    """On the disk of a folder that need not be there yet. Raises OSError (the disk is gone)."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
