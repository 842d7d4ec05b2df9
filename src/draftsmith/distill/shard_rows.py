"""The rows of a shard: trajectories <-> a parquet file in memory, hidden signals <-> tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from draftsmith.distill import codec
from draftsmith.distill.trajectory import Trajectory
from draftsmith.errors import InputError

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
# A column per part of the laws: each compresses by itself, the upper parts well (see `codec`).
_LAWS = ("head", "ids_low", "ids_high", "codes_low", "codes_high")
_SCHEMA = pa.schema(_PLAIN | {f"laws_{part}": pa.large_binary() for part in _LAWS})


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


def to_parquet(trajectories: Sequence[Trajectory], vocab_size: int) -> pa.Buffer:
    """Everything but the hidden signals. Raises InputError for what is no law."""
    columns: dict[str, list[Any]] = {
        name: [getattr(trajectory, name) for trajectory in trajectories] for name in _PLAIN
    }
    laws = [
        None if trajectory.top is None else codec.encode(trajectory.top, vocab_size)
        for trajectory in trajectories
    ]
    for part in _LAWS:
        columns[f"laws_{part}"] = [None if law is None else getattr(law, part) for law in laws]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=_SCHEMA),
        sink,
        compression="zstd",
        use_dictionary=list(_WORDS),
        write_statistics=False,
    )
    return sink.getvalue()


def from_parquet(data: bytes, hidden: Mapping[str, Tensor]) -> list[Trajectory]:
    """The trajectories of `to_parquet`, with the hidden signals of `hidden_signals`."""
    out = []
    for number, (bare, laws) in enumerate(undecoded(data)):
        features = hidden.get(str(number))
        out.append(
            replace(
                bare,
                top=None if laws is None else codec.decode(laws),
                features=None if features is None else features.float().numpy(),
            )
        )
    return out


def undecoded(data: bytes) -> list[tuple[Trajectory, codec.EncodedLaws | None]]:
    """The trajectories of `to_parquet` without laws, and their laws as they are kept."""
    rows = pq.ParquetFile(pa.BufferReader(data)).read().to_pylist()
    return [(_trajectory(row), _laws(row)) for row in rows]


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


def _laws(row: Mapping[str, Any]) -> codec.EncodedLaws | None:
    if row["laws_head"] is None:
        return None
    return codec.EncodedLaws(
        head=row["laws_head"],
        ids_low=row["laws_ids_low"],
        ids_high=row["laws_ids_high"],
        codes_low=row["laws_codes_low"],
        codes_high=row["laws_codes_high"],
    )


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        prompt_id=row["prompt_id"],
        forcing=row["forcing"],
        index=row["index"],
        temperature=row["temperature"],
        prompt=tuple(row["prompt"]),
        tokens=tuple(row["tokens"]),
        score=row["score"],
        language=row["language"],
        tag=row["tag"],
    )
