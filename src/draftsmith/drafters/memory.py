"""Drafters that may go on from what past requests left.

    request 1     rows ... are gone          what a row left is taken over once the row is gone:
    request 2           `- taken over        when the next request begins, or a session goes on

Rows that draft side by side never see what the others leave.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from draftsmith.config import require
from draftsmith.core.types import RequestBatch
from draftsmith.drafters.base import Drafter, DraftState, RowState, RowStates, TargetView
from draftsmith.drafters.vocabulary import vocabulary_sha256

R = TypeVar("R", bound=RowState)


class Remembering(Drafter, abc.ABC, Generic[R]):
    """A drafter whose rows look at their own text and, where the option `memory` of its `Config`
    says so, at what past requests left: those of one target."""

    draws = False
    config: Any
    """The subclass declares its own, with an option `memory`."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._open: list[tuple[weakref.ref[R], Callable[[], None]]] = []
        self._bound: TargetView | None = None

    @property
    def repeats_outputs(self) -> bool:
        return bool(self.config.memory)

    @abc.abstractmethod
    def begin(self, tokens: Sequence[int]) -> R:
        """A row with this text."""

    @abc.abstractmethod
    def take_over(self, row: R) -> Callable[[], None]:
        """What is to be called once this row is gone; it must not refer to the row itself."""

    @property
    def bound_to(self) -> TargetView | None:
        return self._bound if self.config.memory else None

    def bind(self, target: TargetView) -> None:
        """Refuse to mix targets.

        Raises:
            InputError: what is remembered is of a target with another vocabulary.
        """
        known = target if self._bound is None else self._bound
        theirs, ours = known.tokenizer, target.tokenizer
        if self.config.memory and theirs is not ours:
            digests = {vocabulary_sha256(theirs), vocabulary_sha256(ours)} - {None}
            require(
                len(digests) < 2,
                f"this {type(self).__name__.lower()} drafter remembers texts of a target with "
                "another tokenizer: make another drafter for this one",
            )
        require(
            not self.config.memory or known.vocab_size == target.vocab_size,
            f"this {type(self).__name__.lower()} drafter remembers texts of a target with "
            f"{known.vocab_size} tokens, and this one has {target.vocab_size}: make another "
            "drafter for it",
        )
        self._bound = target

    def start(self, request: RequestBatch) -> RowStates[R]:
        if self.config.memory and self._bound is None:
            raise self.unbound()
        self._remember()
        return self._watched(RowStates([self.begin(tokens) for tokens in request.tokens]))

    def resume(self, state: DraftState, request: RequestBatch) -> DraftState:
        rewound = state.rewind(request.tokens)
        assert isinstance(state, RowStates) and isinstance(rewound, RowStates)
        state.rows = rewound.rows  # rows that began anew are gone
        self._remember()
        return self._watched(rewound)

    def _watched(self, state: RowStates[R]) -> RowStates[R]:
        """Keep an eye on the rows."""
        if self.config.memory:
            seen = {id(row()) for row, _ in self._open}
            new = [row for row in state.rows if id(row) not in seen]
            self._open += [(weakref.ref(row), self.take_over(row)) for row in new]
        return state

    def _remember(self) -> None:
        """Take over what the rows that are gone have left."""
        gone = [take for row, take in self._open if row() is None]
        self._open = [(row, take) for row, take in self._open if row() is not None]
        for take in gone:
            take()
