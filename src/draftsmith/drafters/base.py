"""The contract of a drafter. One file per drafter in this folder; the file's name is its kind.

A drafter proposes tokens (`propose`) from a state that the engine moves on (`advance`), and, when
it has weights, learns (`forward`). Nothing outside this folder asks which drafter it is: what the
engine must know, a drafter declares (`signals`, `proposal kinds on the tree`, `trains`, what shapes
it takes).

The purpose of an option is metadata of its field in the drafter's `Config`:

    noise: float = field(default=0.2, metadata=TRAINING)     training alone reads it
    heads: int = field(default=4, metadata=STRUCTURE)        and only where it begins from nothing
    recompute: bool = field(default=True, metadata=COST)     it does not change the weights
    pickled: bool = field(default=False, metadata=READING)   reading a folder alone looks at it

An option without this is read when the drafter drafts.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from torch import Tensor, nn

from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    RequestBatch,
    Signals,
    TargetOutput,
    TrajectoryBatch,
    TreeShape,
    Verdict,
)
from draftsmith.errors import InputError
from draftsmith.targets.base import BindableTarget as BindableTarget
from draftsmith.targets.base import Target
from draftsmith.targets.base import TargetView as TargetView

if TYPE_CHECKING:
    from draftsmith.core.law import Noise
    from draftsmith.core.sampling import Sampler
    from draftsmith.drafters.tree_growth import Vocabularies


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """How much of each term a drafter is published to learn with (see `ImitationConfig`)."""

    token: float = 1.0
    """The divergence from the target's law."""
    feature: float = 0.0
    """Distance of states from the target's."""
    top: float = 0.0
    """Cross-entropy over the target's ten most probable tokens."""


class DraftState(abc.ABC):
    """What a drafter remembers about the rows of a batch."""

    @abc.abstractmethod
    def take(self, rows: Sequence[int]) -> DraftState:
        """Keep these rows, in this order (rows that are done leave the batch)."""

    @abc.abstractmethod
    def rewind(self, tokens: Sequence[Sequence[int]]) -> DraftState:
        """The rows' known tokens are now exactly `tokens`: forget all beyond the common part."""


@dataclass
class TextState(DraftState):
    """The known tokens of each row, and how many of them are its prompt; changed in place."""

    known: list[list[int]]
    num_prompt: list[int]

    def take(self, rows: Sequence[int]) -> Self:
        self.known = [self.known[b] for b in rows]
        self.num_prompt = [self.num_prompt[b] for b in rows]
        return self

    def rewind(self, tokens: Sequence[Sequence[int]]) -> Self:
        self.known, self.num_prompt = [list(row) for row in tokens], [len(row) for row in tokens]
        return self


class RowState(Protocol):
    """The state of one row that does not depend on other rows."""

    def rewound(self, tokens: Sequence[int]) -> Self:
        """The row with exactly this text."""
        ...


R = TypeVar("R", bound=RowState)


@dataclass(slots=True)
class RowStates(DraftState, Generic[R]):
    """What a drafter remembers that looks at each row alone."""

    rows: list[R]

    def take(self, rows: Sequence[int]) -> RowStates[R]:
        return RowStates([self.rows[b] for b in rows])

    def rewind(self, tokens: Sequence[Sequence[int]]) -> RowStates[R]:
        return RowStates([row.rewound(new) for row, new in zip(self.rows, tokens, strict=True)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The outcome of one step for the drafter: the verdict and its tokens."""

    tree: DraftTree
    """With its numbers on the host."""
    verdict: Verdict
    emitted: Sequence[Sequence[int]]
    """Per row: accepted drafts and then the target's own token (cut where the row stopped)."""
    pending: Sequence[Sequence[int]]
    """Per row: the tokens that were fed before the tree (the last is the root)."""
    out: TargetOutput


class Drafter(nn.Module, abc.ABC):
    """Proposes tokens that the target may emit next."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of this drafter; subclasses declare their own, every field with a docstring."""

    signals: Signals = Signals()
    trains: ClassVar[bool] = False
    """Whether `forward` exists: training-free drafters do not."""
    num_steps: int = 1
    """How many times a training step calls `forward` (one step further ahead per call)."""
    eval_steps: int | None = None
    """How many times an evaluation does, to see how far its drafts get; None: as in training."""
    loss_weights: LossWeights = LossWeights()
    default_shape: TreeShape = TreeShape.chain(5)
    takes_trees: bool = False
    """Whether `propose` branches where the shape does; else it drafts one chain."""
    draws: bool = True
    """Whether its drafts may be draws from laws that it knows: what a lookup finds is none."""
    longest: int | None = None
    """The deepest draft that it can make; None: as deep as it is asked."""
    trained_length: int | None = None
    """Tokens of the longest text that it was trained on, as far as a block goes, or an upper bound
    of that; None: not known."""
    wants_threads: bool = False
    """A network of its own is run by PyTorch: drafts keep PyTorch's threads where the target runs
    in the compiled engine."""
    reads_predictions: bool = False
    """Whether it drafts from `RequestBatch.predictions`."""
    repeats_outputs: bool = False
    """Whether it drafts from outputs, which the same seed would give again: from predictions, or
    past requests. `match` alone verifies these without a change of the law."""
    sources: tuple[str, ...] = ()
    """The name of the source behind each origin of its drafts (`DraftTree.origin_BN`), where it
    joins several. Empty: it is one source."""
    rates_nodes: bool = False
    """Its trees are to say how probable their nodes are (`DraftTree.prob_BN`), also where that
    takes work: a cascade asks for it."""

    def __init__(self, config: Any = None) -> None:
        """`config`: an instance of this class's `Config`; None: all defaults."""
        super().__init__()
        self.config = type(self).Config() if config is None else config

    def bind(self, target: TargetView) -> None:
        """Borrow what is needed of the target (vocabulary, tokenizer, embedding, head)."""

    @property
    def bound_to(self) -> TargetView | None:
        """The target that it borrows from; None: it is not bound, or borrows nothing."""
        return None

    def drawn_from(self, sampler: Sampler) -> tuple[Target, Vocabularies] | None:
        """The language model whose law under `sampler` itself (not at a temperature of its own) a
        first child is a draw of, and how its ids and the target's correspond; None: no language
        model's."""
        return None

    def max_nodes(self, shape: TreeShape) -> int:
        """The most nodes (probes included) that `propose` returns for this shape."""
        return shape.num_nodes

    def widest(self, shape: TreeShape) -> int:
        """The most children that a node has which `propose` returns for this shape."""
        return shape.widest

    @property
    def draw_length(self) -> int:
        """How many tokens end a chain of draws, however long it is to be; 0: no such number."""
        return 0

    def longest_draw(self, shape: TreeShape) -> int:
        """The most tokens of a chain of draws that `propose` returns for this shape."""
        return shape.depth if self.draws else 0

    @property
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that it consists of: itself, unless it joins several."""
        return (self,)

    @classmethod
    def signals_of(cls, config: Any) -> Signals:
        """What it will read of a target with this transformers configuration, bound or not."""
        return cls.signals

    @abc.abstractmethod
    def start(self, request: RequestBatch) -> DraftState:
        """A state for new rows, none of whose tokens the drafter has seen."""

    def resume(self, state: DraftState, request: RequestBatch) -> DraftState:
        """Continue a session: the same rows, now with the request's tokens. A drafter that reads
        `predictions` overrides this."""
        return state.rewind(request.tokens)

    @abc.abstractmethod
    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        """Draft below the last known token of each row.

        Args:
            shape: what no row's draft exceeds.
            depth_B: [B] how deep each row may draft, at most the shape's depth; 0: it does not. A
                row's draft depends on its own depth only, or it would depend on its neighbours.
        """

    @abc.abstractmethod
    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        """Update the state with the verdict; it then stands behind the new root."""

    def head(self) -> Callable[[Tensor], Tensor]:
        """Training: hidden [.., H] -> logits [.., V]. The objective calls it in chunks, and
        differentiates each at once: a call computes from the weights, not from what was made of
        them before."""
        raise self._untrained()

    @property
    def draft_ids(self) -> Tensor | None:
        """[D]: the target's ids of the tokens that it may draft, upwards; None: all."""
        return None

    @property
    def learns_acceptance(self) -> bool:
        """Whether a head of its own learns what is accepted (`DraftPrediction.confidence_BT`):
        from laws, as tokens do not tell."""
        return False

    @property
    def wants_token_counts(self) -> bool:
        """Whether `choose_vocabulary` reads its counts: a store is read once to count tokens."""
        return type(self).choose_vocabulary is not Drafter.choose_vocabulary

    def choose_vocabulary(self, counts_V: Tensor | None) -> None:
        """Training: called before the first step with the counts of each token in the answers; None
        where they are unknown."""

    def save(self, folder: Path, *, kind: str) -> None:
        """Training: write the weights, so that `kind:folder` loads it."""
        raise self._untrained()

    def forward(self, batch: TrajectoryBatch, carry: Any) -> tuple[DraftPrediction, Any]:
        """Training: one step ahead. `carry` is None at first, then what the last call returned."""
        raise self._untrained()

    def unbound(self) -> InputError:
        """The error of a drafter that is to draft and has not borrowed anything from a target."""
        name = type(self).__name__
        return InputError(f"{name} is not bound to a target: call drafter.bind(target) first.")

    def _untrained(self) -> InputError:
        return InputError(f"{type(self).__name__} has nothing to train: its `trains` is False")


TRAINING = {"when": "training"}
"""Metadata of a field that decoding does not read."""
STRUCTURE = {**TRAINING, "fixed": True}
"""Metadata of a training option that is fixed once weights exist."""
COST = {**TRAINING, "free": True}
"""Metadata of a training option that changes time and memory, but not the weights."""
ADDED = {"added": True}
"""Metadata of an option that checkpoints of earlier versions do not know: they had its default."""
READING = {"when": "reading"}
"""Metadata of an option that says how weights are read: no record of the drafter keeps it."""


def options_marked(config: Any, mark: Mapping[str, object]) -> frozenset[str]:
    """Names of the options of a `Config` (class or instance) with this metadata."""
    return frozenset(one.name for one in fields(config) if mark.items() <= one.metadata.items())


def at_least(least: float, *, most: float = math.inf, **values: float) -> None:
    """InputError for an option below `least` or above `most`, or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise InputError(f"drafter option {name} must be at least {least}, got {value}")
        if value > most:
            raise InputError(f"drafter option {name} must be at most {most}, got {value}")
