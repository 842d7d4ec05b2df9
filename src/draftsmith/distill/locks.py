"""One process at a time, by lock files that the system frees when their process dies.

    held(path)                the file is made, locked, and removed at the end
    after a kill              an empty file stays; it is free, and the next one takes it
    waited for meanwhile      who gets the lock of a removed file sees that, and takes the new one

Systems or disks that know no such locks have none: nothing is refused there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from draftsmith.errors import InputError
from draftsmith.provenance import write_error

if sys.platform != "win32":
    import fcntl

_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""What a disk without locks says."""


@contextlib.contextmanager
def held(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Nobody else is in here with this path.

    Raises:
        InputError: somebody is, and it says `busy`; without that they are waited for. Or the file
            cannot be made.
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = _locked(path, busy)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is ours
        os.close(descriptor)


def _locked(path: Path, busy: str | None) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(busy or f"cannot lock {path}") from None
        except OSError as error:
            if error.errno in _UNKNOWN:
                return descriptor
            os.close(descriptor)
            raise write_error(path, error) from error
        except BaseException:  # interrupted while waiting
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
