"""This module defines trajectories, the requests for them and the interface of the backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.core.types import Signals

Forcing = Literal["greedy", "sample", "beam", "gold"]
"""Where the tokens come from: the teacher's best ones, its draws, its beams, or a reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopK:
    """The teacher's K most probable tokens at each of N places: true log-probabilities at
    temperature 1 (no processor), not renormalised."""

    ids_NK: NDArray[np.int32]
    """Ascending in each row."""
    log_p_NK: NDArray[np.float32]
    vocab_size: int | None = None
    """Entries of the teacher's head; None: not known."""

    def __len__(self) -> int:
        return len(self.ids_NK)

    def part(self, start: int, stop: int) -> TopK:
        """The places [start, stop)."""
        return TopK(
            ids_NK=self.ids_NK[start:stop],
            log_p_NK=self.log_p_NK[start:stop],
            vocab_size=self.vocab_size,
        )

    @staticmethod
    def cat(parts: Sequence[TopK]) -> TopK:
        """One after the other; narrower ones are filled with id 0 at probability 0."""
        if len(parts) == 1:
            return parts[0]
        width, sizes = max(one.ids_NK.shape[1] for one in parts), {one.vocab_size for one in parts}

        def joined(name: str, fill: float) -> NDArray[Any]:
            out = np.full((sum(map(len, parts)), width), fill, getattr(parts[0], name).dtype)
            start = 0
            for one in parts:
                cells = getattr(one, name)
                out[start : start + len(one), : cells.shape[1]] = cells
                start += len(one)
            return out

        return TopK(
            ids_NK=joined("ids_NK", 0),
            log_p_NK=joined("log_p_NK", -np.inf),
            vocab_size=sizes.pop() if len(sizes) == 1 else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A continuation and its teacher's laws.

    prompt      p0 p1 p2
    tokens               y0 y1 y2 #        # is the end token: there when the text ended by itself
    top                  l0 l1 l2 l3       law l_i is the one that y_i was (or could be) drawn from
    """

    prompt_id: str
    """In the prompt file."""
    forcing: Forcing
    index: int = 0
    """Which beam (best first), sample or reference of its prompt."""
    temperature: float | None = None
    """Sampling temperature; None for what is not sampled."""
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    score: float
    """Sum of log p(y_i), nats, under the teacher's law at temperature 1."""
    top: TopK | None = None
    features: NDArray[np.float32] | None = field(default=None, repr=False)
    """[len(prompt) + len(tokens), S] hidden signals of every position, when they were asked for."""
    language: str | None = None
    tag: str | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def answer_length(self) -> int:
        return len(self.tokens)

    @property
    def has_features(self) -> bool:
        return self.features is not None

    def states(self, places: int) -> Tensor:
        """[places, S] float32: the hidden signals of the first places."""
        assert self.features is not None, "ask has_features first"
        return torch.from_numpy(self.features[:places])

    def without_logprobs(self) -> Trajectory:
        """The same text without its teacher's logprobs."""
        return replace(self, top=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectRequest:
    """A prompt whose continuations are wanted."""

    prompt_id: str
    prompt: tuple[int, ...]
    references: tuple[tuple[int, ...], ...] = ()
    """Given continuations (for `gold`), end token included."""
    language: str | None = None
    tag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectSettings:
    """What is wanted of every prompt. The same settings and requests give the same trajectories."""

    forcing: Forcing = "greedy"
    temperatures: tuple[float, ...] = (1.0,)
    """Temperatures to sample at; 0 is greedy."""
    samples: int = 1
    """Per prompt and temperature."""
    top_p: float = 1.0
    """Nucleus of the samples."""
    beams: int | Literal["auto"] = 1
    """Width of the beam search; auto: as many as still add probability (see `mass_gain`)."""
    max_beams: int = 16
    mass_gain: float = 0.05
    """With `auto`: a further beam is kept while it adds this share to the mass of those before."""
    length_penalty: float = 0.0
    """Beams are compared by score / length ** this."""
    max_new_tokens: int = 256
    top_k: int | None = 50
    """Laws are cut to this many tokens; None: whole laws."""
    signals: Signals = field(default_factory=Signals)
    """Hidden states to keep."""
    seed: int = 0

    @property
    def most_beams(self) -> int:
        """Widest beam search that may be needed."""
        return self.max_beams if self.beams == "auto" else self.beams


class Backend(Protocol):
    """What can produce trajectories: our own loop, or an engine."""

    def collect(
        self, requests: Sequence[CollectRequest], settings: CollectSettings
    ) -> list[Trajectory]:
        """All trajectories of these prompts, prompt by prompt, in order of `index`."""
