"""How a draft model's tokens are the target's: the same, padded at the end, or a subset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.drafters._reader import Vocabularies
from draftsmith.errors import BackendError

SUBSET_FILE = "draft_vocab.safetensors"
"""Beside a draft model that knows only some of the target's tokens."""


def same_tokens(draft: Any, target: Any) -> bool:
    """Whether equal ids mean equal tokens (padding at the end of either aside)."""
    if draft is None or target is None:
        return True  # token ids only: the caller says that they are the same
    ours, theirs = draft.get_vocab(), target.get_vocab()
    small, large = sorted((ours, theirs), key=len)
    return all(large.get(token) == i for token, i in small.items())


def padded(draft_size: int, target_size: int) -> Vocabularies:
    """One family, vocabularies padded differently: the common ids, no mass on the rest."""
    common = min(draft_size, target_size)

    def to_target(logits_RV: Tensor) -> Tensor:
        if draft_size == target_size:
            return logits_RV
        room = target_size - common
        return torch.nn.functional.pad(logits_RV[:, :common], (0, room), value=-torch.inf)

    def to_draft(ids: Tensor) -> Tensor:
        return ids.clamp(max=common - 1) if target_size > common else ids

    return Vocabularies(size=target_size, to_draft=to_draft, to_target=to_target)


@dataclass(frozen=True, slots=True)
class Subset:
    """The draft model knows only some of the target's tokens."""

    d2t: Tensor
    """[Vd]: the target's id of each draft id."""
    unknown: int
    """Draft id that every other token is read as."""

    @classmethod
    def beside(cls, source: str) -> Subset | None:
        """What the draft model's folder says about its vocabulary, if it is a subset."""
        path = Path(source) / SUBSET_FILE
        if not source or not path.is_file():
            return None
        tensors = load_file(path)
        missing = {"d2t", "unknown"} - tensors.keys()
        if missing:
            raise BackendError(
                f"{path} holds no tensor {min(missing)!r}: train the draft model again."
            )
        return cls(tensors["d2t"].long(), int(tensors["unknown"]))

    def vocabularies(self, draft_size: int, target_size: int) -> Vocabularies:
        d2t, unknown = self.d2t, self.unknown
        fits = bool(((d2t >= 0) & (d2t < target_size)).all()) and 0 <= unknown < draft_size
        if len(d2t) != draft_size or not fits:
            raise BackendError(
                f"The draft model's vocabulary subset names {len(d2t)} of its {draft_size} ids and "
                f"target ids up to {int(d2t.max())}, but the target has {target_size}: it was made "
                "for another target."
            )
        t2d = torch.full((target_size,), unknown)
        t2d[d2t] = torch.arange(len(d2t))
        there = {t2d.device: (d2t, t2d)}  # uploaded once

        def tables(device: torch.device) -> tuple[Tensor, Tensor]:
            if device not in there:
                there[device] = d2t.to(device), t2d.to(device)
            return there[device]

        def to_target(logits_RV: Tensor) -> Tensor:
            wide = logits_RV.new_full((logits_RV.shape[0], target_size), -torch.inf)
            wide[:, tables(logits_RV.device)[0]] = logits_RV
            return wide

        def to_draft(ids: Tensor) -> Tensor:
            return tables(ids.device)[1][ids]

        return Vocabularies(size=target_size, to_draft=to_draft, to_target=to_target)
