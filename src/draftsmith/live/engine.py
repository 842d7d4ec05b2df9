"""The decoding of one update: the draft judged in one forward, then on to the end.

An update of a live translation is a `Job`: a prompt, the last output as a draft, and how far
verification leans towards it. The decoding loop does the rest, on a cache that outlives the job.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from draftsmith.biased import biased_rule
from draftsmith.decode import DecodeOptions, Session, decode
from draftsmith.drafters._after import After
from draftsmith.drafters._base import Drafter, TargetView
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prediction import Prediction
from draftsmith.rows import common_prefix
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target
from draftsmith.types import ALIGNED, RowStats, TreeShape


class LiveTarget(Target, TargetView, Protocol):
    """A target that drafters can be bound to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What an update asks of the target."""

    prompt: tuple[int, ...]
    draft: tuple[int, ...]
    """Empty: nothing is expected."""
    bias: float
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the target answered; counts as in `UpdateRecord`."""

    tokens: tuple[int, ...]
    """Without an end of sequence."""
    whole: bool
    """It ended by itself."""
    drafted: int
    accepted: int
    redrafted: int
    reaccepted: int
    forwards: int
    fed: int
    seconds: float
    first_seconds: float


@dataclass(frozen=True, slots=True)
class _FirstWhole:
    """The whole last output at first; later drafts are short."""

    whole: int
    later: int

    def length(self, stats: RowStats) -> int:
        return self.whole if stats.steps == 0 and self.whole else self.later

    @property
    def max_length(self) -> int:
        return max(self.whole, self.later)


class Engine:
    """Runs the jobs of one live translation, one after the other.

    Args:
        redraft: use the jobs' drafts; without, this is autoregressive re-translation.
        resync: length of drafts from the old tail behind a divergence; 0: none.
        then: drafts where nothing is expected; it is bound here.
    """

    def __init__(
        self,
        target: LiveTarget,
        *,
        redraft: bool = True,
        resync: int = 0,
        then: Drafter | None = None,
        sampler: Sampler | None = None,
        seed: int = 0,
    ) -> None:
        self.target, self.redraft = target, redraft
        self.sampler, self.seed = sampler or Sampler(), seed
        self._later = max(resync, 0 if then is None else then.default_shape.depth)
        first = Prediction(Prediction.Config(resync=resync > 0))
        self.drafter: Drafter = then or NoDrafter()
        if redraft:
            self.drafter = first if then is None else After(first, then)
        self.drafter.bind(target)
        self.session = Session()

    def run(self, job: Job) -> Outcome:
        """One update's decoding. After an error or an interrupt the next job starts afresh."""
        draft = job.draft if self.redraft else ()
        rule, sampler = biased_rule(job.bias if draft else 0.0, self.sampler)
        policy = _FirstWhole(len(draft), self._later)
        options = DecodeOptions(
            sampler=sampler,
            rule=rule,
            max_new_tokens=job.max_new_tokens,
            shape=TreeShape.chain(max(policy.max_length, 1)) if self.redraft else None,
            policy=policy if self.redraft else None,
            seed=self.seed,
            allow_lossy=rule.lossy,
        )
        held = self.session.tokens[0] if self.session.tokens else []
        kept = min(common_prefix(list(job.prompt), held), len(job.prompt) - 1)
        tokens: list[int] = []
        origins: list[int] = []
        offered: list[int] = []
        first, began = 0.0, time.perf_counter()
        finish: str | None = None
        predictions = [draft] if self.redraft else ()
        for step in decode(
            self.target,
            self.drafter,
            [job.prompt],
            options,
            predictions=predictions,
            session=self.session,
        ):
            first = first or time.perf_counter() - began
            tokens.extend(step.emitted[0])
            origins.extend(step.origins[0])
            offered.append(step.offered_depth[0])
            finish = step.finish[0]
        drafted = offered[0] if draft else 0
        accepted = sum(origin == ALIGNED for origin in origins) if draft else 0
        return Outcome(
            tokens=tuple(token for token in tokens if token not in self.target.end_ids),
            whole=finish == "stop",
            drafted=drafted,
            accepted=accepted,
            redrafted=sum(offered) - drafted,
            reaccepted=len(origins) - accepted,
            forwards=len(offered),
            fed=len(job.prompt) - kept + sum(offered) + len(offered) - 1,
            seconds=time.perf_counter() - began,
            first_seconds=first,
        )
