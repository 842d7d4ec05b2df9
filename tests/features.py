"""The target's states, as drafters over hidden states are given them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.drafters.hidden.drafter import Features


def keep(features: Features, rows: Sequence[Tensor]) -> None:
    """Append [n_b, S] to each row."""
    features.append(pad_sequence(list(rows), batch_first=True), [range(len(row)) for row in rows])
