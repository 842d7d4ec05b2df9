"""The C++ extension: built at first use, kept in the user's cache, and called through ctypes.

    engine.cpp  --compiler-->  ~/.cache/draftsmith/native/<digest>/engine.so  --ctypes-->  Library
                                                                  engine.sha256

The digest is of the sources, the compiler and the processor: a folder that is shared between
machines holds one build for each. Building takes some seconds, once. A library that is not as it
was built (cut, overwritten) is built again: loading a damaged one can end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from draftsmith.errors import BackendError, DraftsmithError
from draftsmith.provenance import atomic_path, cache_folder, write_text_atomic

SOURCES = ("lanes.hpp", "matrix.hpp", "attention.hpp", "engine.cpp")
OPTIONS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    # a product and a sum become one operation only where the source says so: every width of a
    # forward must round alike
    "-ffp-contract=off",
)
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300


class NotBuilt(BackendError):
    """The extension cannot be built or used here; the message says why."""


class Matrix(Structure):
    """`Matrix` of matrix.hpp."""

    _fields_ = [
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("group", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
    ]


class Layer(Structure):
    """`Layer` of engine.cpp."""

    _fields_ = [
        ("norm_in", c_void_p),
        ("norm_mlp", c_void_p),
        ("norm_q", c_void_p),
        ("norm_k", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class Fusion(Structure):
    """`Fusion` of engine.cpp."""

    _fields_ = [
        *[(name, c_void_p) for name in ("norm", "both", "beside", "unknown")],
        *[(name, Matrix) for name in ("fc", "gate", "up", "down")],
    ]


class Places(Structure):
    """`Places` of engine.cpp."""

    _fields_ = [
        ("count", c_int32),
        ("masks", c_void_p),
        *[(name, Matrix) for name in ("out", "before", "added")],
    ]


_MEASURES = ("layers", "hidden", "heads", "kv_heads", "width", "mlp", "halves")


class Model(Structure):
    """`Model` of engine.cpp."""

    _fields_ = [
        *[(name, c_int32) for name in _MEASURES],
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(Layer)),
        ("norm_out", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("fusion", Fusion),
        ("places", Places),
    ]


class Call(Structure):
    """`Call` of engine.cpp."""

    _fields_ = [
        *[(name, c_int32) for name in ("threads", "rows", "width", "staged", "keep")],
        *[(name, c_int32) for name in ("num_signals", "last_hidden", "cache_bf16")],
        ("feature_width", c_int32),
        ("count", c_void_p),
        ("last", c_int64),
        *[(name, c_void_p) for name in ("feature", "token", "position", "see", "column", "slot")],
        ("first_slot", c_int64),
        *[(name, c_void_p) for name in ("committed", "cache")],
        *[(name, c_int64) for name in ("layer_stride", "row_stride", "head_stride")],
        *[(name, c_void_p) for name in ("logits", "signal_at", "signal", "cosine", "sine")],
    ]


class Chain(Structure):
    """`Chain` of engine.cpp."""

    _fields_ = [
        *[(name, c_int32) for name in ("steps", "vocab")],
        *[(name, c_void_p) for name in ("token_of", "uniform")],
        *[(name, c_double) for name in ("temperature", "confidence")],
        *[(name, c_void_p) for name in ("count", "chosen", "scores")],
    ]


class Pages:
    """Memory of the extension, filled from the front, freed with the last array that lies in it.

    Pages are large (2 MiB), because a forward reads all weights: a norm or a scale has none of its
    own.
    """

    SIZE = 32 << 20

    def __init__(self, c: ctypes.CDLL, size: int) -> None:
        self._c, self.size, self.used = c, max(size, self.SIZE), 0
        self.at: int = c.ds_allocate(self.size)
        if not self.at:
            raise MemoryError(f"no memory for {size} bytes of weights")

    def __del__(self) -> None:
        if getattr(self, "at", None):
            self._c.ds_free(self.at)


class Library:
    """The loaded extension.

    Raises:
        NotBuilt: it cannot be loaded.
    """

    def __init__(self, file: Path) -> None:
        try:
            self.c = ctypes.CDLL(os.fspath(file))
        except OSError as error:
            raise NotBuilt(f"The C++ extension cannot be loaded: {error}.") from error
        self.c.ds_isa.restype = ctypes.c_char_p
        self.c.ds_open.restype = c_void_p
        self.c.ds_open.argtypes = [POINTER(Model)]
        self.c.ds_close.argtypes = [c_void_p]
        self.c.ds_forward.argtypes = [c_void_p, POINTER(Call)]
        self.c.ds_chain.argtypes = [c_void_p, POINTER(Call), POINTER(Chain)]
        self.c.ds_block.argtypes = [c_void_p, POINTER(Call), POINTER(Chain)]
        self.c.ds_added.argtypes = [c_void_p, c_void_p, ctypes.c_int, ctypes.c_int, c_void_p]
        self.c.ds_open_heads.restype = c_void_p
        self.c.ds_open_heads.argtypes = [POINTER(Matrix), ctypes.c_int, ctypes.c_int]
        self.c.ds_close_heads.argtypes = [c_void_p]
        self.c.ds_heads.argtypes = [c_void_p, c_void_p, ctypes.c_int, ctypes.c_int, c_void_p]
        self.c.ds_draw.restype = c_int64
        self.c.ds_draw.argtypes = [c_void_p, ctypes.c_int, c_double, c_double]
        self.c.ds_reject.restype = c_int64
        self.c.ds_reject.argtypes = [
            *(c_void_p, ctypes.c_int, c_double, c_int64),  # the law, and the token
            *(c_void_p, c_void_p, ctypes.c_int, c_void_p),  # q, and two uniform numbers
        ]
        self.c.ds_judge_chain.restype = c_int64
        self.c.ds_judge_chain.argtypes = [
            *(c_void_p, ctypes.c_int, c_double),  # the laws
            *(ctypes.c_int, c_void_p),  # the chain
            *(c_void_p, c_void_p, c_void_p),  # q
            *(c_void_p, c_void_p, c_void_p),  # uniform numbers, and where the token goes
        ]
        self.c.ds_allocate.restype = c_void_p
        self.c.ds_allocate.argtypes = [c_size_t]
        self.c.ds_free.argtypes = [c_void_p]
        self.c.ds_row.argtypes = [POINTER(Matrix), c_int64, c_void_p]
        self.c.ds_multiply.argtypes = [POINTER(Matrix), c_void_p, ctypes.c_int, c_void_p]
        self.instructions: str = self.c.ds_isa().decode()
        """Which instructions it uses: `avx512-vnni`, with tiles `avx512-vnni, amx`, `avx2` or
        `plain`."""
        self._pages: Pages | None = None
        self._lock = threading.Lock()

    def room(self, size: int) -> tuple[Pages, int]:
        """Pages with so many bytes free, to be kept as long as these are used, and their place: a
        multiple of 64."""
        size = max(-(-size // 64) * 64, 64)
        with self._lock:
            if self._pages is None or self._pages.used + size > self._pages.size:
                self._pages = Pages(self.c, size)
            pages = self._pages
            pages.used += size
            return pages, pages.at + pages.used - size


def compiler() -> str | None:
    """The C++ compiler's path: of CXX in the environment, or the first that is there."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, COMPILERS)), None)


@functools.cache
def library() -> Library:
    """Build it where that has not been done, and load it.

    Raises:
        NotBuilt: there is no compiler, it fails, or its work cannot be loaded.
    """
    command = compiler()
    if command is None:
        wanted = os.environ.get("CXX") or "c++, g++ or clang++"
        raise NotBuilt(f"There is no C++ compiler here ({wanted}): install g++ or clang++.")
    file = cache_folder("native") / _digest(command) / "engine.so"
    if _is_whole(file):
        return Library(file)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as place:
        built = Path(place) / file.name
        _build(command, built)
        with contextlib.suppress(DraftsmithError):  # an unwritable cache: built again next time
            with atomic_path(file) as part:
                shutil.copyfile(built, part)
            write_text_atomic(_digest_of(file), _sha256(built))
        return Library(built)


def _is_whole(file: Path) -> bool:
    """Whether it is as it was built."""
    try:
        return _digest_of(file).read_text(encoding="utf-8") == _sha256(file)
    except (OSError, ValueError):
        return False


def _digest_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _build(command: str, file: Path) -> None:
    source = Path(__file__).with_name(SOURCES[-1])
    done = _run(command, *OPTIONS, os.fspath(source), "-o", os.fspath(file))
    if done.returncode or not file.is_file():
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise NotBuilt(f"The compiler {command} refuses draftsmith's C++ extension: {last}")


def _run(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [command, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"The compiler {command} does not end well: {error}.") from error


def _digest(command: str) -> str:
    here = Path(__file__).parent
    said = _run(command, "--version").stdout.encode()
    parts = [(here / name).read_bytes() for name in SOURCES]
    parts += [said, " ".join(OPTIONS).encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` reads: two machines with equal instructions share a build."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.machine()} {flags}"
