"""Texts of a trajectory store, shard by shard: a damaged one stops, or is said and left out.

shard 0   good       its texts, laws and hidden states
shard 1   damaged    nothing of it, however far it could be read
shard 2   good       ..
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from draftsmith.distill.codec import EncodedLaws
from draftsmith.distill.packing import Weighted
from draftsmith.distill.store import TrajectoryStore
from draftsmith.distill.stored_features import StoredFeatures
from draftsmith.distill.stored_laws import LawFile
from draftsmith.distill.trajectory import Trajectory
from draftsmith.errors import BackendError
from draftsmith.provenance import digest
from draftsmith.recipes._lessons import prompt_key
from draftsmith.recipes._training import say


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A text of a shard, its laws as they are kept, and where its hidden states are."""

    trajectory: Trajectory
    laws: EncodedLaws | None
    features: StoredFeatures | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTexts:
    """What can be learnt of a store."""

    store: TrajectoryStore
    good: tuple[int, ...]
    """Numbers of the shards that are learnt from."""
    bad: tuple[int, ...]
    """Of those that are damaged."""
    documents: tuple[Weighted, ...]

    def checksum(self) -> str:
        """Of everything in the good shards, by the checksums that they name."""
        files = [file for number in self.good for file in self.store.shard(number).files]
        return digest([[file.name, file.sha256] for file in files])


def read_shards(
    store: TrajectoryStore, laws: LawFile | None, width: int, on_bad: Literal["stop", "skip"]
) -> StoredTexts:
    """All texts that are not empty, one shard in memory at a time, with their laws in `laws`.

    Args:
        width: of their hidden states, which stay where they are; 0: none are wanted.
        on_bad: what to do about a damaged shard.

    Raises:
        BackendError: a shard is damaged, or there is no room for the laws.
    """
    good: list[int] = []
    bad: list[int] = []
    documents: list[Weighted] = []
    for number in store.shards():
        try:
            rows = _rows(store, number, width)
        except BackendError as error:
            if on_bad == "stop":
                raise BackendError(f"{error} (--on-bad-shard skip leaves it out)") from error
            say(f"left out a shard: {error}")
            bad.append(number)
            continue
        good.append(number)
        # a full disk is no damage of the shard: it stops in any case
        for row in rows:
            kept = None if laws is None or row.laws is None else laws.add(row.laws)
            documents.append(Weighted(trajectory=row.trajectory, laws=kept, features=row.features))
    return StoredTexts(store=store, good=tuple(good), bad=tuple(bad), documents=tuple(documents))


def say_unfinished(store: TrajectoryStore) -> None:
    """Say on stderr where `collect` has not ended, or shards that it wrote have gone since.

    Nothing is said of a store that was filled from Python: only who fills it knows when it is full.
    """
    if "shard_size" not in store.header.settings:  # which `collect` puts there
        return
    there, written = len(store.shards()), _written(store)
    if written is None:
        what = (
            "has no run.json of `collect`, which writes it last: the collection has not ended, or "
            "that file was not copied"
        )
    elif there < written:
        what = f"lacks {written - there} of the {written} shards that its collection ended with"
    else:
        return
    say(
        f"warning: {store.folder} {what}; the {there} shards that are there are learnt from, and "
        "the same `collect` command again does what is missing"
    )


def _written(store: TrajectoryStore) -> int | None:
    """How many shards there were when `collect` ended, which may since be at work again; None: it
    has not, or nothing tells."""
    try:
        record: Any = json.loads((store.folder / "run.json").read_text(encoding="utf-8"))
        found = record["results"]["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int else None


def _rows(store: TrajectoryStore, number: int, width: int) -> list[Row]:
    """Those of one shard, all of it checked. Raises BackendError."""
    file = store.features(number)
    rows = []
    for place, (trajectory, laws) in enumerate(store.undecoded(number)):
        if not trajectory.tokens:
            continue
        # ids are names within one prompt file; two stores may use one for two prompts
        named = replace(trajectory, prompt_id=prompt_key(trajectory.prompt))
        places = len(named.prompt) + len(named.tokens)
        features = file.of(place, places, width) if width else None
        if features is not None:
            features.read(places)  # NaN is named now, not in the middle of a training
        rows.append(Row(trajectory=named, laws=laws, features=features))
    return rows
