"""Signed results: what produced a file, and writing so that a kill or a full disk ruins nothing.

Every artefact carries a `run.json`: the command that recreates it, all options, versions, the git
revision, a summary of the machine, times. It names no host, and no folder outside the current one:

    run = start_run("bench", options, seed=0)
    ...
    run.write(out)                                   # out/run.json

Files are written beside their final place and renamed onto it: a reader sees the old file or the
new one, never a half. Room is checked before: in a budget, and on the disk. A full disk is a
`BackendError` that names the file. Of two runs into one folder the second is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from draftsmith.config import as_dict, check_whole, to_argv
from draftsmith.errors import BackendError, DraftsmithError, InputError

_log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BUSY = 0.75
"""Share of the CPUs that may be busy before a measurement begins."""
PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "statsmodels",
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has begun; `write` signs what came of it."""

    verb: str
    options: object
    """A dataclass of options (or a mapping, for runs that are not verbs)."""
    seed: int | None
    started: datetime.datetime = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    )
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    """Name of this run alone: what it writes in many lines carries it, too."""

    def record(self, *, results: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The content of `run.json`, as of now."""
        ended = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        return {
            "id": self.id,
            "command": command_line(self.verb, self.options),
            "verb": self.verb,
            "options": _portable(jsonable(self.options)),
            "seed": self.seed,
            "started": self.started.isoformat(),
            "ended": ended.isoformat(),
            "versions": versions(),
            "git": git_revision(),
            "machine": machine_summary(),
            "results": jsonable(results or {}),
        }

    def begin(self, folder: Path) -> None:
        """Say that the files in `folder` are this run's, though its run.json is written last."""
        write_json_atomic(Path(folder) / BEGUN, {"verb": self.verb, "id": self.id})

    def write(self, folder: Path, *, results: Mapping[str, object] | None = None) -> Path:
        """Write `folder/run.json`; `results` are figures that belong to the artefact."""
        path = Path(folder) / "run.json"
        write_json_atomic(path, self.record(results=results))
        path.with_name(BEGUN).unlink(missing_ok=True)
        return path


def start_run(
    verb: str, options: object, *, seed: int | None = None, out: Path | None = None
) -> Run:
    """Begin a run now; `out`: a folder in which it takes the place of an earlier one of its verb.

    Raises:
        InputError: see `refuse_others`.
    """
    if out is not None:
        refuse_others(out, verb)
    return Run(verb=verb, options=options, seed=seed)


BEGUN = ".begun.json"
"""Stands in a folder from a run's first file to its run.json, where a later run must know."""


def refuse_others(out: Path, verb: str, names: Sequence[str] = ()) -> None:
    """Raise InputError if `out` holds what a run of another verb wrote; or a run.json or file of
    these names that no run of `verb` wrote, finished or only begun."""
    whose = recorded(out / "run.json", "verb") or recorded(out / BEGUN, "verb")
    there = [name for name in ("run.json", *names) if (out / name).exists()]
    if whose != verb and (whose or there):
        what = f"the results of `draftsmith {whose}`" if whose else repr(there[0])
        raise InputError(f"--out {out} already holds {what}; choose another folder or delete it.")


def command_line(verb: str, options: object) -> str:
    """The shortest command that recreates a run with these options, quoted for a shell."""
    words = to_argv(options) if dataclasses.is_dataclass(options) else []
    return shlex.join(["draftsmith", *verb.split(), *(portable_text(word) for word in words)])


def versions() -> dict[str, str | None]:
    """Python and the packages that decide results; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def is_first_process() -> bool:
    """Whether this is the only process of a run, or the first of those that train together."""
    group = sys.modules.get("torch.distributed")  # not imported for this: most verbs go without
    if group is None or not (group.is_available() and group.is_initialized()):
        return True
    return bool(group.get_rank() == 0)


def git_revision() -> dict[str, Any] | None:
    """Commit of draftsmith's own checkout and whether files differ from it; None elsewhere."""
    here = Path(__file__).resolve().parent
    top = _git(here, "rev-parse", "--show-toplevel")
    # An installed package may lie inside somebody else's repository: that revision is not ours.
    if top is None or Path(top).resolve() / "src" / "draftsmith" != here:
        return None
    commit = _git(here, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(here, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes)}


def usable_cpus() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_summary() -> dict[str, Any]:
    """What decides speed, without names of hosts, users or folders."""
    memory = memory_bytes()
    summary: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "cpus": usable_cpus(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "torch_threads": None,
        "accelerators": [],
    }
    # Asking torch would import it; a run that never used it has nothing to report.
    torch = sys.modules.get("torch")
    if torch is not None:
        summary["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            summary["accelerators"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return summary


def load_of_others() -> str | None:
    """Describe the load in a phrase; None: there is little, or the system does not report it.

    Ask before the work begins: a moment later the load is our own. That of the minute before may be
    so, too: where the system tells, something has to run now as well.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= max(1.0, BUSY * cpus) or not _others_run():
        return None
    return f"other programs use this machine (load {load:.1f} on {cpus} CPUs)"


def _others_run(looks: int = 9) -> bool:
    """Whether more than this thread runs, at most looks; True where the system does not tell."""
    seen = 0
    try:
        for _ in range(looks):
            running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3]
            seen += int(running.partition("/")[0]) > 1
            time.sleep(0.01)
    except (OSError, ValueError, IndexError):
        return True
    return seen > looks // 2


def warn_if_busy() -> None:
    """Log that speed-ups will be off, where other programs are at work."""
    others = load_of_others()
    if others is not None:
        _log.info("%s: speed-ups measured now will be off; close them and run again", others)


def portable_text(text: str) -> str:
    """`text` with absolute paths made relative to the current folder, or cut to `~` or `.../name`.

    Only words that are paths as a whole, lists of them, KIND:PATH, or drafters joined by '+' are
    touched: a prompt is not.
    """
    pieces = re.split(r"(,|\+(?=[\w.-]+:/(?!/)))", text)
    return "".join(_portable_piece(piece) for piece in pieces)


# --------------------------------------------------------------------------- writing


def jsonable(value: object) -> Any:
    """Plain JSON: as `as_dict`, and a figure that is not finite (it has no meaning) is null."""
    plain = as_dict(value)
    if isinstance(plain, dict):
        return {key: jsonable(item) for key, item in plain.items()}
    if isinstance(plain, list):
        return [jsonable(item) for item in plain]
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain


@contextlib.contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """A fresh path beside `path` to write a file or a folder to; moved onto `path` on success.

        with atomic_path(out / "model.safetensors") as part:
            save_file(tensors, part)

    On any error nothing is left behind and `path` is as it was. A folder replaces a folder.
    """
    path = Path(path)
    part = fresh_beside(path)
    try:
        device = path.exists() and not (path.is_file() or path.is_dir())
        # root would rename its file onto /dev/null; /dev/stdout is a link, to a file perhaps
        if device or os.path.realpath(path.parent) == "/dev":
            raise InputError(f"cannot write {path}: it is a device or a pipe; name a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        _sync(part)
        if part.is_dir() and path.is_dir():
            old = part.with_name(f"{part.name}.old")
            replace_folder(part, path, aside=old)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(part, path)
        _flush(path.parent)  # the name alone: other processes may be writing other files there
    except Exception as error:
        if isinstance(error, DraftsmithError) or not is_write_failure(error):
            raise
        raise write_error(path, system_error(error)) from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                part.unlink()


def fresh_beside(path: Path) -> Path:
    """A new name for what is on its way to `path`; `output_folder` removes what a kill leaves."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


_LEFT = re.compile(r"\..+\.[0-9a-f]{8}\.tmp|\.tmp-model-\d+")
"""Names of `fresh_beside`, and those that earlier versions gave to half-written models."""


def replace_folder(new: Path, path: Path, *, aside: Path) -> None:
    """Rename the folder `new` to `path`; the one that was there is then at `aside`.

    On any error it is at `path` again: a folder cannot be renamed onto one that holds files, so for
    a moment there is none.
    """
    try:
        if path.exists():
            os.replace(path, aside)
        os.replace(new, path)
    except BaseException:
        if aside.exists() and not path.exists():
            with contextlib.suppress(OSError):
                os.replace(aside, path)
        raise


def write_text_atomic(path: Path | str, text: str) -> None:
    """Write a UTF-8 file, whole or not at all."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def digest(value: object) -> str:
    """SHA-256 of the JSON that `value` becomes, in hexadecimal."""
    text = json.dumps(jsonable(value), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_json(text: str, where: str, **hooks: Any) -> Any:
    """Parse JSON that may be anybody's, by `json.loads` with these hooks.

    Raises:
        InputError: naming `where`: no JSON; brackets deeper than functions that walk over values
            go; half a character, which JSON can hold as an escape and no file or tokenizer takes.
    """
    try:
        value = json.loads(text, **hooks)
        deep = text.count("[") + text.count("{") > _DEEPEST and _depth(value) > _DEEPEST
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise InputError(f"{where}: not JSON ({error.msg} at {place} {error.colno})") from None
    except ValueError as error:  # of a hook, or Python's, which says how to lift its limit
        raise InputError(f"{where}: {error if hooks else 'a number is too long'}") from None
    except RecursionError:
        deep = True
    if deep:
        raise InputError(f"{where}: not JSON that can be read: its brackets are too deep")
    if _SURROGATE.search(text):
        check_whole(json.dumps(value, ensure_ascii=False), f"{where}: a text in it")
    return value


_DEEPEST = 100
"""Brackets within brackets that JSON may have."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _depth(value: Any) -> int:
    """Brackets within brackets."""
    depth, level = 0, [value]
    while level := [
        item
        for one in level
        if isinstance(one, (dict, list))
        for item in (one.values() if isinstance(one, dict) else one)
    ]:
        depth += 1
    return depth


def refuse_device(path: Path) -> None:
    """Raise InputError for a device: /dev/zero has no end, and would fill the memory."""
    if path.is_char_device():
        raise InputError(f"cannot read: {path} is a device and no file")


def read_json(path: Path, what: str = "file") -> Any:
    """Read a JSON file. Raises InputError, which calls it `what`."""
    refuse_device(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the {what} {path}: {reason}") from None
    return parse_json(text, f"cannot read the {what} {path}")


def recorded(path: Path, *keys: str) -> Any:
    """Look up a value in a JSON file, a run.json say; None where there is none."""
    with contextlib.suppress(InputError, KeyError, TypeError):
        return functools.reduce(lambda found, key: found[key], keys, read_json(path))
    return None


def write_json_atomic(path: Path | str, value: object) -> None:
    """Write indented JSON, whole or not at all; figures that are not finite become null."""
    text = json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_text_atomic(path, f"{text}\n")


def append_jsonl(path: Path | str, *records: object) -> None:
    """Append records, one line each, all or none; a half line that a kill left is cut off first."""
    path = Path(path)
    lines = "".join(
        json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"
        for record in records
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            size = _whole_lines(file.seek(0, os.SEEK_END), file)
            try:
                file.truncate(size)
                data = memoryview(lines.encode())
                while data:
                    data = data[file.write(data) :]
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path | str, error: OSError) -> DraftsmithError:
    """What to tell the user when `path` could not be written."""
    if error.errno in DISK_FULL:
        reason = "no space is left on the disk; nothing was half-written, free some and run again"
        return BackendError(f"cannot write {path}: {reason}")
    return InputError(f"cannot write {path}: {error.strerror or error}")


def is_write_failure(error: BaseException) -> bool:
    """Whether the system refused a write, also when a library that writes from native code wrapped
    its error in one of its own (safetensors: SafetensorError, tokenizers: a bare Exception)."""
    kind = type(error)
    if isinstance(error, OSError):
        return True
    if kind.__name__ == "SafetensorError" and kind.__module__.startswith("safetensors"):
        return True
    return re.search(r"os error (27|28|122)\b|No space left", str(error)) is not None


def system_error(error: Exception) -> OSError:
    """The system's error in one that `is_write_failure` knows."""
    if isinstance(error, OSError):
        return error
    text = str(error)
    found = re.search(r"(?:os error|code:) (\d+)\b", text)
    if found is not None:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if "No space left" in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return OSError((text.splitlines() or ["unknown error"])[0])


# --------------------------------------------------------------------------- inside


def _whole_lines(size: int, file: Any) -> int:
    """Length of `file` up to and including its last line feed."""
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0


def _sync(path: Path) -> None:
    """Flush a file, or a folder and the files in it, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            if child.is_file():
                _flush(child)
    _flush(path)


def _flush(path: Path) -> None:
    """Flush a file's content, or a folder's names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders, and needs no such flush
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping, within the limit of a container; None where the
    system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            (found,) = (line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return None
    free, group = int(found.split()[1]) * 1024, Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no limit is the word "max"
        return free


def _portable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return portable_text(value) if isinstance(value, str) else value


def _portable_piece(piece: str) -> str:
    match = re.fullmatch(r"((?:[\w.-]+[:=])?)(\S.*)", piece, flags=re.DOTALL)
    if match is None or not os.path.isabs(match[2]):
        return piece
    prefix, path = match[1], Path(match[2])
    # With blanks in it this is a prompt that happens to begin with a slash, unless it is there.
    if re.search(r"\s", piece) and not _exists(path):
        return piece
    for base, sign in ((Path.cwd(), Path()), (Path.home(), Path("~"))):
        if path == base or base in path.parents:
            return f"{prefix}{sign / path.relative_to(base)}"
    return f"{prefix}.../{path.name}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


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


def cache_folder(kind: str) -> Path:
    """The user's cache for files of this kind; it need not be there yet, nor be writable."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # the specification has relative ones ignored
    if os.path.isabs(given):
        return Path(given) / "draftsmith" / kind
    try:
        return Path.home() / ".cache" / "draftsmith" / kind
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "draftsmith" / kind


# --------------------------------------------------------------------------- one run at a time

_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of a disk without locks."""


@contextlib.contextmanager
def held(path: Path, *, busy: str | None = None) -> Iterator[bool]:
    """Hold a lock on this path: the file is made, locked, and removed at the end.

    The system frees the lock of a process that dies; the empty file that stays is free. Gives False
    where the disk knows no locks: nothing is refused there.

    Raises:
        InputError: another holds it, with the message `busy`; without one it is waited for. Or
            the file cannot be made.
    """
    lock = FileLock(path, timeout=0 if busy else -1, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        try:
            path.touch()  # filelock takes a folder in which no file can be made for a busy one
        except OSError as error:
            raise write_error(path, error) from error
        raise InputError(busy or f"cannot lock {path}") from None
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise write_error(path, error) from error
    try:
        yield lock.is_locked
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # while it is ours
        lock.release()


@contextlib.contextmanager
def output_folder(out: Path) -> Iterator[None]:
    """Around a run that writes several files to the folder `out`: no other run does so meanwhile.

    Readers need no leave. What killed writers left half-written is removed. A folder that was made
    for a run which writes nothing goes again.

    Raises:
        InputError: another run writes there, or the folder cannot be made or written to.
    """
    try:
        if out.exists() and not out.is_dir():
            raise InputError(f"--out {out} is a file; give a folder.")
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
    except OSError as error:
        raise write_error(out, error) from error
    busy = f"--out {out}: another run is writing to this folder; wait for its end, or give another"
    try:
        with held(out / ".lock", busy=busy) as locked:
            if locked:
                sweep(out)
            else:
                _log.info(f"the disk of --out {out} knows no locks: let no other run write there")
            yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # it is in use
                folder.rmdir()


def sweep(folder: Path) -> None:
    """Remove what killed writers left in a folder that is locked, so that none is alive."""
    for path in folder.iterdir():
        if _LEFT.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
