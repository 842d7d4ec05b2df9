"""Top-K laws <-> bytes: exact ids, 16-bit log-probabilities, a size that no content can exceed.

A law of K ids out of V takes, before any compression (K = 50, V = 128,256 in brackets):

    ids_low      K * l bits, l = floor(log2(V / K))    lowest bits of every id        [68.75 bytes]
    ids_high     K + ((V - 1) >> l) bits               the rest, as marks on a line   [14 bytes]
    codes_high   K bytes                               log-probability, upper byte    [50 bytes]
    codes_low    K bytes                               and lower byte                 [50 bytes]

Ids are ascending, so their upper bits are steps up a line (Elias 1974, Fano 1971): one mark per id,
one gap per step. Deltas in variable-length bytes take 100 and have no bound of their own.

    ids, l = 2       1      6      7      13
    low bits        01     10     11      01
    upper            0      1      1       3
    place + upper    0      2      3       6          line 1011001

A law with all V ids stores none. The parts stay apart because they compress differently: the two
upper ones shrink, the lower ones are noise.

Codes: log p = -(c * s)**2 with s = sqrt(104) / 65534, so an entry near 1 is kept to 2e-8 and none
is off by more than `error_bound`: at most 2 s sqrt(|log p|) + s**2, half of that for most. Below
-104, where a probability is zero in float32 anyway, values are cut to -104; -inf has its own code.
The probabilities that come back never sum to more than 1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftsmith.distill.trajectory import TopK
from draftsmith.errors import BackendError, InputError

VERSION = 1
LOWEST = 104.0
"""-log p, nats: exp(-104) is below the smallest number of float32."""
NOTHING = 65535
"""The code of -inf."""
STEP = LOWEST**0.5 / (NOTHING - 1)
"""Of sqrt(-log p)."""
TOLERANCE = 1e-3
"""What rounding may have made a law's sum exceed 1 by; more is a mistake."""

_HEAD = struct.Struct("<BBIII")  # version, whole laws, N, K, V
_LOG_P = np.append(-np.square(np.arange(NOTHING) * STEP), -np.inf).astype(np.float32)
_P = np.exp(_LOG_P.astype(np.float64))
_CELLS = 1 << 22  # at a time: bounds the memory of whole laws over a large vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedLaws:
    """The laws of N places in parts (see the drawing); `head` names the version and the sizes."""

    head: bytes
    ids_low: bytes
    ids_high: bytes
    codes_low: bytes
    codes_high: bytes

    @property
    def num_bytes(self) -> int:
        parts = (self.head, self.ids_low, self.ids_high, self.codes_low, self.codes_high)
        return sum(map(len, parts))


def encode(top: TopK, vocab_size: int) -> EncodedLaws:
    """Laws over ids below `vocab_size`. Rows need not be sorted; they come back ascending.

    Raises:
        InputError: shapes, ids or probabilities that no law has.
    """
    _check_shapes(top, vocab_size)
    N, K = top.ids_NK.shape
    ids_NK, log_p_NK = top.ids_NK.astype(np.int32, copy=False), top.log_p_NK
    if (ids_NK[:, 1:] < ids_NK[:, :-1]).any():
        order_NK = np.argsort(ids_NK, axis=1, kind="stable")
        ids_NK = np.take_along_axis(ids_NK, order_NK, axis=1)
        log_p_NK = np.take_along_axis(log_p_NK, order_NK, axis=1)
    # rows with fewer than K entries may be filled up with any id at -inf
    twice_NK = (ids_NK[:, 1:] == ids_NK[:, :-1]) & np.isfinite(log_p_NK[:, 1:] + log_p_NK[:, :-1])
    if twice_NK.any():
        raise InputError(f"the law of place {twice_NK.any(axis=1).argmax()} holds an id twice")
    whole = vocab_size == K and bool((ids_NK == np.arange(K)).all())
    codes_NK = np.empty((N, K), np.dtype("<u2"))
    rows = max(1, _CELLS // max(1, K))
    low, high = [], []
    for start in range(0, N, rows):
        codes_NK[start : start + rows] = _codes(log_p_NK[start : start + rows])
        if not whole:
            low_bits, high_bits = _split_ids(ids_NK[start : start + rows], vocab_size)
            low.append(low_bits)
            high.append(high_bits)
    pairs = codes_NK.reshape(-1).view(np.uint8)
    return EncodedLaws(
        head=_HEAD.pack(VERSION, whole, N, K, vocab_size),
        ids_low=_pack(low),
        ids_high=_pack(high),
        codes_low=pairs[0::2].tobytes(),
        codes_high=pairs[1::2].tobytes(),
    )


def decode(laws: EncodedLaws) -> TopK:
    """The laws again. Raises BackendError for bytes that `encode` did not write."""
    if len(laws.head) != _HEAD.size or laws.head[0] != VERSION:
        version = laws.head[0] if laws.head else "none"
        raise BackendError(
            f"the laws are encoded in version {version}, this draftsmith reads version {VERSION}; "
            "read them with the draftsmith that wrote them, or collect again"
        )
    _, whole, N, K, V = _HEAD.unpack(laws.head)
    low_bits, line_bits = (0, 0) if whole else _bits(K, V)
    sizes = (-(-N * low_bits * K // 8), -(-N * line_bits // 8), N * K, N * K)
    parts = (laws.ids_low, laws.ids_high, laws.codes_low, laws.codes_high)
    if tuple(map(len, parts)) != sizes:
        raise BackendError(f"the encoded laws of {N} places are cut short or too long")
    pairs_MC = np.stack([np.frombuffer(part, np.uint8) for part in parts[2:]], axis=-1)
    log_p_NK = _LOG_P[pairs_MC.view("<u2").reshape(N, K)]
    if whole:
        ids_NK = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    else:
        ids_NK = _join_ids(laws.ids_low, laws.ids_high, N, K, V)
    return TopK(ids_NK=ids_NK, log_p_NK=log_p_NK, vocab_size=V)


def error_bound(log_p: NDArray[np.floating]) -> NDArray[np.float64]:
    """How far a decoded log-probability may be from `log_p` in [-104, 0], nats.

    Where a row's probabilities sum to more than 1 (rounding), the log of that sum comes on top.
    """
    x = -np.asarray(log_p, np.float64)
    bound: NDArray[np.float64] = 2 * STEP * np.sqrt(x) + STEP**2 + x * 2.0**-23  # of float32
    return bound


# --------------------------------------------------------------------------- log-probabilities


def _codes(log_p_NK: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest codes; downwards (toward smaller p) in rows whose sum would exceed 1."""
    exact_NK = np.minimum(log_p_NK.astype(np.float64), 0)
    total_N = np.exp(exact_NK).sum(axis=1)
    if not (total_N <= 1 + TOLERANCE).all() or (log_p_NK > TOLERANCE).any():
        raise InputError(
            "the probabilities of a law sum to more than 1, or one is not a number; "
            "laws are natural logarithms of probabilities, not logits"
        )
    codes_NK = np.rint(_places(exact_NK)).astype(np.uint16)
    codes_NK[np.isneginf(exact_NK)] = NOTHING
    over_N = _P[codes_NK].sum(axis=1) > 1
    if over_N.any():
        codes_NK[over_N] = _codes_below(exact_NK[over_N], total_N[over_N])
    return codes_NK


def _codes_below(exact_NK: NDArray[np.float64], total_N: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Of the decoded values that are not above the exact ones, the largest: no sum can grow."""
    # 1e-15: the sum of what is left is at most 1 in float64 too
    exact_NK = exact_NK - np.where(total_N > 1, np.log(total_N) + 1e-15, 0)[:, None]
    codes_NK = np.ceil(_places(exact_NK)).astype(np.uint16)
    above_NK = (_LOG_P[codes_NK] > exact_NK) & (codes_NK < NOTHING - 1)  # by rounding to float32
    codes_NK += above_NK
    codes_NK[np.isneginf(exact_NK)] = NOTHING
    return codes_NK


def _places(log_p_NK: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where values lie between codes, 0 to 65534."""
    places_NK: NDArray[np.float64] = np.sqrt(np.minimum(-log_p_NK, LOWEST)) / STEP
    return places_NK


# --------------------------------------------------------------------------- ids


def _bits(K: int, V: int) -> tuple[int, int]:
    """(low bits of an id, bits of a row's line)."""
    low = max(0, (V // max(1, K)).bit_length() - 1)
    return low, K + ((V - 1) >> low)


def _split_ids(
    ids_NK: NDArray[np.int32], vocab_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """One byte per bit: low bits, lowest first, and lines."""
    N, K = ids_NK.shape
    low, line = _bits(K, vocab_size)
    low_NKL = (ids_NK[..., None] >> np.arange(low)) & 1
    line_NU = np.zeros((N, line), np.uint8)
    line_NU[np.arange(N)[:, None], (ids_NK >> low) + np.arange(K)] = 1
    return low_NKL.astype(np.uint8).reshape(-1), line_NU.reshape(-1)


def _join_ids(low_bytes: bytes, high_bytes: bytes, N: int, K: int, V: int) -> NDArray[np.int32]:
    low, line = _bits(K, V)
    line_NU = _unpack(high_bytes, N * line).reshape(N, line)
    if (line_NU.sum(axis=1, dtype=np.int64) != K).any():
        raise BackendError("the encoded ids are damaged: a line has not one mark per id")
    marks_NK = np.nonzero(line_NU)[1].reshape(N, K)
    ids_NK = ((marks_NK - np.arange(K)) << low).astype(np.int32)
    bits_NKL = _unpack(low_bytes, N * K * low).reshape(N, K, low)
    for bit in range(low):
        ids_NK |= bits_NKL[..., bit].astype(np.int32) << bit
    if (ids_NK >= V).any():
        raise BackendError(f"the encoded ids are damaged: one is not below {V}")
    return ids_NK


def _pack(bits: list[NDArray[np.uint8]]) -> bytes:
    return np.packbits(np.concatenate(bits)).tobytes() if bits else b""


def _unpack(data: bytes, count: int) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count)


# --------------------------------------------------------------------------- inside


def _check_shapes(top: TopK, vocab_size: int) -> None:
    ids_NK, log_p_NK = top.ids_NK, top.log_p_NK
    if ids_NK.ndim != 2 or ids_NK.shape != log_p_NK.shape:
        raise InputError(
            "laws need ids and log-probabilities of the same shape [N, K], "
            f"got {ids_NK.shape} and {log_p_NK.shape}"
        )
    if ids_NK.shape[1] > vocab_size:
        raise InputError(f"a law of {ids_NK.shape[1]} ids does not fit {vocab_size} tokens")
    if ids_NK.size and not 0 <= ids_NK.min() <= ids_NK.max() < vocab_size:
        raise InputError(
            f"a law holds ids from {ids_NK.min()} to {ids_NK.max()}, the vocabulary has "
            f"{vocab_size} tokens"
        )
