"""The tokens that a drafter's logits are of: all of the target's, or a draft vocabulary.

    draft vocabulary    2  5  6           logits   [ a  b  c ]
    the target's        0 1 2 3 4 5 6 7   widened  [ . . a . . b c . ]     .: -inf

What is searched are the columns, several times fewer than tokens; what was found becomes ids. They
ascend, so that of equal columns the first is the lowest token in either form.

Shape letters: R rows, D columns, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.core.law import Law


@dataclass(frozen=True, slots=True)
class Columns:
    """Which tokens the columns of logits are."""

    vocab_size: int
    """Number of tokens in the target's vocabulary."""
    ids_D: Tensor | None = None
    """Upwards, on the device of the logits; None: column = token."""

    def __post_init__(self) -> None:
        if self.ids_D is not None and len(self.ids_D) == self.vocab_size:
            object.__setattr__(self, "ids_D", None)  # ids that ascend are all there are

    @property
    def count(self) -> int:
        return self.vocab_size if self.ids_D is None else len(self.ids_D)

    def tokens(self, columns: Tensor) -> Tensor:
        """Their ids."""
        if self.ids_D is None:
            return columns
        if columns.device.type == "cpu":  # numpy takes a tenth of the time for a few numbers
            return torch.from_numpy(self.ids_D.numpy()[columns.numpy()])
        return self.ids_D[columns]

    def widened(self, own: Tensor) -> Tensor:
        """[.., D] -> [.., V], -inf for the tokens that are no column."""
        if self.ids_D is None:
            return own
        wide = own.new_full((*own.shape[:-1], self.vocab_size), -torch.inf)
        return wide.index_copy(-1, self.ids_D, own)

    def named(self, law: Law) -> Law:
        """A law over the columns as one over their tokens."""
        if self.ids_D is None:
            return law
        return Law(law.probs_RK, self.vocab_size, self.ids_D.expand(law.num_rows, -1))

    def narrowed(self, law: Law) -> Law:
        """The same law, which has no mass on other tokens, without these."""
        if self.ids_D is None or law.ids_RK is not None:
            return law
        ids_RD = self.ids_D.expand(law.num_rows, -1)
        return Law(law.probs_RK.index_select(1, self.ids_D), law.vocab_size, ids_RD)
