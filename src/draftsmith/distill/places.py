"""Where something is learnt or measured, and the laws there.

    position       0      1      2      3
    law_ahead(1)   5      -      6      .     row of the next token's law: - none, . no next token
    masks          law    token  law    .     what is learnt there, if it counts

A teacher and a student with one tokenizer may have heads of different sizes, by rows of padding
behind the tokens (Qwen2.5: 152,064 and 151,936). Whole laws are learnt and measured over the
entries that both have, each law renormalised; no draft can be of the target's other ones.

B rows, T time, N places, K kept tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.distill.divergence import Divergence
from draftsmith.distill.objective import cached_places
from draftsmith.errors import InputError
from draftsmith.types import DraftPrediction, FullLaws, TeacherLaws, TopLaws, TrajectoryBatch

CELLS = 1 << 24
"""Places times vocabulary at a time where they are not in a cache anyway: 64 MiB in float32, which
glibc gives back (blocks above 32 MiB; many of a few MiB less pile up)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What is known of N places that count."""

    hidden_NH: Tensor
    tokens_N: Tensor
    rows_N: Tensor
    """Row of `all_laws`; -1: none."""
    weights_N: Tensor
    uniform_N: Tensor
    """A number in [0, 1), for objectives that draw."""
    all_laws: TeacherLaws | None

    def __len__(self) -> int:
        return len(self.tokens_N)

    def laws(self) -> TeacherLaws:
        """The laws of these places."""
        assert self.all_laws is not None
        return self.all_laws.take(self.rows_N)

    def _cached(self, vocab: int) -> int | None:
        width = self.hidden_NH.shape[-1]
        if isinstance(self.all_laws, FullLaws):
            width = max(width, self.all_laws.hidden_NH.shape[-1])
        return cached_places(vocab, width, self.hidden_NH.device)

    def split(self, cells: int | None, vocab: int) -> Iterator[Places]:
        """Parts of at most `cells` logits, one place at least. None: as many as stay in a cache,
        else `CELLS`."""
        size = max(1, cells // vocab) if cells else self._cached(vocab) or max(1, CELLS // vocab)
        for part, hidden_NH in enumerate(self.hidden_NH.split(size) if len(self) else ()):
            at = slice(part * size, (part + 1) * size)
            yield Places(
                hidden_NH=hidden_NH,
                tokens_N=self.tokens_N[at],
                rows_N=self.rows_N[at],
                weights_N=self.weights_N[at],
                uniform_N=self.uniform_N[at],
                all_laws=self.all_laws,
            )


def masks(
    prediction: DraftPrediction, batch: TrajectoryBatch, record: Divergence | None
) -> tuple[Tensor, Tensor]:
    """[B, T] each: counted places that learn a law, and those that learn their token."""
    counted_BT = prediction.mask_BT.bool() & batch.mask_ahead(prediction.ahead)
    has_law_BT = batch.law_ahead(prediction.ahead) >= 0
    if record is not None and record.hard:
        has_law_BT = torch.zeros_like(has_law_BT)
    return counted_BT & has_law_BT, counted_BT & ~has_law_BT


def gather(
    prediction: DraftPrediction, batch: TrajectoryBatch, mask_BT: Tensor, *, draws: bool = False
) -> Places:
    """What is known of the places of a mask. `draws`: a number in [0, 1) for each, too."""
    weights_N = batch.weights_ahead(prediction.ahead)[mask_BT]
    return Places(
        hidden_NH=prediction.hidden_BTH[mask_BT],
        tokens_N=batch.tokens_ahead(prediction.ahead)[mask_BT],
        rows_N=batch.law_ahead(prediction.ahead)[mask_BT],
        weights_N=weights_N,
        uniform_N=torch.rand_like(weights_N) if draws else torch.zeros_like(weights_N),
        all_laws=batch.laws,
    )


def check_laws(places: Places, vocab: int) -> None:
    """InputError when truncated laws cannot be those of this student's vocabulary."""
    if not len(places) or isinstance(places.all_laws, FullLaws):
        return
    if places.all_laws is None:
        raise InputError("the batch names rows of laws but carries no laws; read them with it")
    laws = places.all_laws.take(places.rows_N)
    if int(laws.ids_NK.max()) >= vocab:
        empty_NK = laws.log_p_NK == -math.inf
        highest = int(laws.ids_NK.masked_fill(_whole(laws) | empty_NK, 0).max())
        if highest >= vocab:
            raise InputError(
                f"a law holds token {highest}, the student's vocabulary has {vocab}; "
                "distil a student with the teacher's tokenizer"
            )
    if not bool((laws.log_p_NK.amax(-1) > -math.inf).all()):
        raise InputError("a law holds no token at all; collect the trajectories again")


def both_logits(laws: FullLaws, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's logits at these places (no gradient) and the student's, over the entries that
    both heads have."""
    with torch.no_grad():
        teacher_NV = laws.head(laws.hidden_NH).to(logits_NV.dtype)
    size = min(teacher_NV.shape[-1], logits_NV.shape[-1])
    return teacher_NV[:, :size], logits_NV[:, :size]


def over_both(laws: TopLaws, logits_NV: Tensor) -> tuple[TopLaws, Tensor]:
    """The same of laws that were kept whole, each renormalised. Laws of the best tokens alone stay
    as they are: what lies outside of these is no single entry to them."""
    size, vocab = laws.vocab_size, logits_NV.shape[-1]
    if size is None or size == vocab or laws.ids_NK.shape[-1] < size:
        return laws, logits_NV
    if size < vocab:
        return laws, logits_NV[:, :size]
    inside_NK = laws.ids_NK < vocab
    log_p_NK = laws.log_p_NK.masked_fill(~inside_NK, -math.inf)
    log_p_NK = log_p_NK.log_softmax(-1).where(_whole(laws), log_p_NK)
    there_K = inside_NK.any(0)  # where ids stand in order, just the student's
    inside = TopLaws(
        ids_NK=laws.ids_NK.where(inside_NK, 0)[:, there_K],
        log_p_NK=log_p_NK[:, there_K],
        vocab_size=vocab,
    )
    return inside, logits_NV


def _whole(laws: TopLaws) -> Tensor:
    """[N, 1]: laws of every entry of the teacher's head. A batch may hold others beside them."""
    kept_N1 = (laws.log_p_NK > -math.inf).sum(-1, keepdim=True)
    return kept_N1 == (math.inf if laws.vocab_size is None else laws.vocab_size)


def preferred(laws: TeacherLaws) -> Tensor:
    """[N]: the teacher's most probable token."""
    if isinstance(laws, FullLaws):
        return laws.head(laws.hidden_NH).argmax(-1)
    return laws.ids_NK.gather(-1, laws.log_p_NK.argmax(-1, keepdim=True))[:, 0].long()


def wide(values: Tensor) -> Tensor:
    """At least float32."""
    return values if values.dtype == torch.float64 else values.float()
