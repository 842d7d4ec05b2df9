"""The files of a shard: rows as Parquet, logprobs in 16 bits, hidden signals, sealed JSON, locks.

A law of K ids out of V has exact ids and 16-bit log-probabilities, in a size that no content can
exceed. It takes, before any compression (K = 50, V = 128,256 in brackets):

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

import hashlib
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import digest, jsonable, read_json, write_json_atomic

FORMAT = 1


def write_sealed(path: Path, value: object) -> None:
    """JSON with a checksum of its own content."""
    content = jsonable(value)
    write_json_atomic(path, {"format": FORMAT, "sha256": digest(content), **content})


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """What `write_sealed` was given. Raises BackendError: damaged, or of another format."""
    try:
        content = read_json(path)
    except InputError as error:
        raise BackendError(f"{error}; {remedy}") from None
    content = content if isinstance(content, dict) else {}
    number, checksum = content.pop("format", None), content.pop("sha256", None)
    if number != FORMAT:
        raise BackendError(
            f"{path} is of format {number!r} and this draftsmith reads {FORMAT}: it is damaged, or "
            f"of another version; {remedy}"
        )
    if checksum != digest(content):
        raise BackendError(f"{path} is damaged: its content has not the sha256 it names; {remedy}")
    return content


VERSION = 1
LOWEST = 104.0
"""-log p, nats: exp(-104) is below the smallest number of float32."""
NOTHING = 65535
"""The code of -inf."""
STEP = LOWEST**0.5 / (NOTHING - 1)
"""Distance of two codes in sqrt(-log p)."""
TOLERANCE = 1e-3
"""What rounding may have made a law's sum exceed 1 by; more is a mistake."""

_HEAD = struct.Struct("<BBIII")  # version, whole laws, N, K, V
_LOG_P = np.append(-np.square(np.arange(NOTHING) * STEP), -np.inf).astype(np.float32)
_P = np.exp(_LOG_P.astype(np.float64))
_CELLS = 1 << 22  # at a time: bounds the memory of whole laws over a large vocabulary


# A column per part (see the drawing): each compresses by itself, the upper parts well. The head
# names the version and the sizes.
LAW_COLUMNS = ("laws_head", "laws_ids_low", "laws_ids_high", "laws_codes_low", "laws_codes_high")


def encode(top: TopK, vocab_size: int) -> dict[str, bytes]:
    """The columns that hold laws over ids below `vocab_size`. Rows need not be sorted; they come
    back ascending.

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
    head = _HEAD.pack(VERSION, whole, N, K, vocab_size)
    codes = pairs[0::2].tobytes(), pairs[1::2].tobytes()
    return dict(zip(LAW_COLUMNS, (head, _pack(low), _pack(high), *codes), strict=True))


def stored_logprobs(columns: Mapping[str, Any]) -> TopK | None:
    """The laws of a row; None: none are stored. Raises BackendError as `decode` does."""
    return None if columns[LAW_COLUMNS[0]] is None else decode(columns)


def decode(columns: Mapping[str, bytes]) -> TopK:
    """The laws again. Raises BackendError for bytes that `encode` did not write."""
    head, *parts = (columns[name] for name in LAW_COLUMNS)
    if len(head) != _HEAD.size or head[0] != VERSION:
        version = head[0] if head else "none"
        raise BackendError(
            f"the laws are encoded in version {version}, this draftsmith reads version {VERSION}; "
            "read them with the draftsmith that wrote them, or collect again"
        )
    _, whole, N, K, V = _HEAD.unpack(head)
    low_bits, line_bits = (0, 0) if whole else _bits(K, V)
    sizes = (-(-N * low_bits * K // 8), -(-N * line_bits // 8), N * K, N * K)
    if tuple(map(len, parts)) != sizes:
        raise BackendError(f"the encoded laws of {N} places are cut short or too long")
    pairs_MC = np.stack([np.frombuffer(part, np.uint8) for part in parts[2:]], axis=-1)
    log_p_NK = _LOG_P[pairs_MC.view("<u2").reshape(N, K)]
    if whole:
        ids_NK = np.tile(np.arange(K, dtype=np.int32), (N, 1))
    else:
        ids_NK = _join_ids(parts[0], parts[1], N, K, V)
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
    """Return the largest codes whose values are not above the exact ones: no sum can grow."""
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
        raise InputError(f"logprobs of {ids_NK.shape[1]} ids do not fit {vocab_size} tokens")
    if ids_NK.size and not 0 <= ids_NK.min() <= ids_NK.max() < vocab_size:
        raise InputError(
            f"logprobs hold ids from {ids_NK.min()} to {ids_NK.max()}, the vocabulary has "
            f"{vocab_size} tokens"
        )


FeatureType = Literal["bfloat16", "float16"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WORDS = ("prompt_id", "forcing", "language", "tag")
"""Columns whose values repeat from row to row."""
_PLAIN = {
    "prompt_id": pa.string(),
    "forcing": pa.string(),
    "index": pa.int32(),
    "temperature": pa.float64(),
    "score": pa.float64(),
    "prompt": pa.list_(pa.int32()),
    "tokens": pa.list_(pa.int32()),
    "language": pa.string(),
    "tag": pa.string(),
}
_SCHEMA = pa.schema(_PLAIN | {column: pa.large_binary() for column in LAW_COLUMNS})


def check(trajectory: Trajectory, vocab_size: int, top_k: int | None) -> None:
    """Raises InputError for a trajectory whose parts do not belong together."""
    where = f"trajectory {trajectory.index} of prompt {trajectory.prompt_id!r}"
    top, features = trajectory.top, trajectory.features
    places, ids = len(trajectory.tokens), (*trajectory.prompt, *trajectory.tokens)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"{where} holds ids from {min(ids)} to {max(ids)}, the vocabulary has "
            f"{vocab_size} tokens"
        )
    limit = vocab_size if top_k is None else top_k
    if top is not None and (len(top) != places or top.ids_NK.shape[1] > limit):
        raise InputError(
            f"{where} has {places} tokens and laws of shape {top.ids_NK.shape}; expected one law "
            f"per token, of at most {limit} ids"
        )
    if features is not None and (features.ndim != 2 or len(features) != len(ids)):
        raise InputError(
            f"{where} has hidden signals of shape {features.shape}; expected a row for each of "
            f"its {len(ids)} positions"
        )


GROUP_BYTES = 1 << 20
"""Size of a row group before compression: what a reader decodes to get at one trajectory."""


def to_parquet(trajectories: Sequence[Trajectory], vocab_size: int) -> pa.Buffer:
    """Everything but the hidden signals. Raises InputError for what is no law."""
    columns: dict[str, list[Any]] = {
        name: [getattr(trajectory, name) for trajectory in trajectories] for name in _PLAIN
    }
    laws = [{} if one.top is None else encode(one.top, vocab_size) for one in trajectories]
    columns |= {name: [law.get(name) for law in laws] for name in LAW_COLUMNS}
    table = pa.table(columns, schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, GROUP_BYTES * len(table) // max(1, table.nbytes)),
        compression="zstd",
        use_dictionary=list(_WORDS),
        write_statistics=False,
    )
    return sink.getvalue()


def from_parquet(data: bytes, hidden: Mapping[str, Tensor]) -> list[Trajectory]:
    """The trajectories of `to_parquet`, with the hidden signals of `hidden_signals`."""
    out = []
    for number, row in enumerate(pq.ParquetFile(pa.BufferReader(data)).read().to_pylist()):
        laws = {name: row.pop(name) for name in LAW_COLUMNS}
        features = hidden.get(str(number))
        row |= {"prompt": tuple(row["prompt"]), "tokens": tuple(row["tokens"])}
        out.append(
            Trajectory(
                **row,
                top=stored_logprobs(laws),
                features=None if features is None else features.float().numpy(),
            )
        )
    return out


def hidden_signals(
    trajectories: Sequence[Trajectory], feature_type: FeatureType
) -> dict[str, Tensor]:
    """Hidden signals by row number, in the type that they are kept in. Raises InputError."""
    found = {}
    for number, trajectory in enumerate(trajectories):
        if trajectory.features is None:
            continue
        kept = torch.tensor(trajectory.features).to(_DTYPES[feature_type])
        if not torch.isfinite(kept).all():
            raise InputError(
                f"hidden signals of prompt {trajectory.prompt_id!r} are not finite in "
                f"{feature_type} (bfloat16 has the range of float32)"
            )
        found[str(number)] = kept
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """What batching needs to know of a shard's rows, one entry per row, without reading them.

    A shard's JSON file holds these columns as words, so that the checksum of that file covers them.
    """

    prompt_key: Sequence[str]
    """`prompt_key` of the prompt."""
    forcing: Sequence[str]
    index: Sequence[int]
    temperature: Sequence[float | None]
    score: Sequence[float]
    prompt_length: Sequence[int]
    answer_length: Sequence[int]
    highest: Sequence[int]
    """Highest token id of prompt and answer; -1: both are empty."""
    has_logprobs: Sequence[int]
    """1 where teacher logprobs are stored, else 0."""

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], has_logprobs: Sequence[int]) -> ShardIndex:
        """The index of rows with these columns: those of `_INDEXED`."""
        prompts, answers = columns["prompt"], columns["tokens"]
        texts = zip(prompts, answers, strict=True)
        return cls(
            prompt_key=[prompt_key(prompt) for prompt in prompts],
            forcing=columns["forcing"],
            index=columns["index"],
            temperature=columns["temperature"],
            score=[float(score) for score in columns["score"]],
            prompt_length=list(map(len, prompts)),
            answer_length=list(map(len, answers)),
            highest=[max((*prompt, *tokens), default=-1) for prompt, tokens in texts],
            has_logprobs=has_logprobs,
        )

    @classmethod
    def from_words(cls, words: Mapping[str, str]) -> ShardIndex:
        """Read what `words` wrote. Raises ValueError, KeyError or TypeError when it is damaged."""

        def column(name: str, kind: Callable[[str], Any]) -> list[Any]:
            found = words[name].split()
            if "-" in found:
                return [None if word == "-" else kind(word) for word in found]
            return list(map(kind, found))

        kinds: dict[str, Callable[[str], Any]]
        kinds = {"prompt_key": str, "forcing": sys.intern, "temperature": float, "score": float}
        return cls(**{one.name: column(one.name, kinds.get(one.name, int)) for one in fields(cls)})

    def words(self) -> dict[str, str]:
        """Every column as words with single spaces between them; `-` stands for None."""
        return {
            one.name: " ".join("-" if v is None else str(v) for v in getattr(self, one.name))
            for one in fields(self)
        }

    def __len__(self) -> int:
        return len(self.prompt_key)


_INDEXED = ["prompt", "tokens", "forcing", "index", "temperature", "score"]


def index_of(trajectories: Sequence[Trajectory]) -> ShardIndex:
    """The index of these trajectories."""
    columns = {name: [getattr(one, name) for one in trajectories] for name in _INDEXED}
    return ShardIndex.of(columns, [int(one.top is not None) for one in trajectories])


def read_index(path: Path) -> ShardIndex:
    """Build the index of a shard that was written without one: reads its columns of tokens.

    Raises:
        OSError, pa.ArrowException, ValueError: the file is damaged.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        columns = file.read(columns=[*_INDEXED, LAW_COLUMNS[0]]).to_pydict()
    return ShardIndex.of(columns, [int(head is not None) for head in columns[LAW_COLUMNS[0]]])


def prompt_key(tokens: Sequence[int]) -> str:
    """A name of a prompt that depends on nothing but its tokens (128 bits in hexadecimal)."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:32]
