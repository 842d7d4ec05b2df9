"""What a distillation brought: a draft model's figures before and after, on held-out prompts.

alpha               computed from the laws of both models at every place of the target's own
                    texts: no noise but that of the choice of texts
tokens per step     decoded
speed-up            over plain decoding; it and both draft models run interleaved
after / before      seconds per token of the old draft model over those of the new one, with a
                    bootstrap interval over prompts: a gain is claimed only if 1 lies outside
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.bench.records import BASELINE, RunRecord
from draftsmith.bench.runner import Item
from draftsmith.bench.statistics import (
    DrafterFigures,
    Interval,
    bootstrap_interval,
    figures,
    paired_paces,
    weighted_speedup,
)
from draftsmith.distill.collect import TransformersBackend
from draftsmith.distill.measure import MeasureOptions, measure_acceptance
from draftsmith.distill.trajectory import CollectRequest, CollectSettings, Trajectory
from draftsmith.option_groups import ModelOptions
from draftsmith.recipes._drafting import open_target
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target

BEFORE, AFTER = "shipped draft", "distilled draft"
"""What the two arms are called."""
DRAFT_LENGTH: Literal["adaptive"] = "adaptive"
"""As for --draft-length: a fixed length would suit one of the two better than the other."""
LEAST_GAIN = 0.001
"""Of alpha: what the table rounds away is no gain."""

Texts = Mapping[float, Sequence[Trajectory]]
"""What the target said, by temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A draft model at one temperature."""

    alpha: float
    """Expected acceptance of a drafted token."""
    tokens_per_step: float | None
    speedup: float | None
    """Over plain decoding."""
    speedup_ci95: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Before and after at one temperature."""

    temperature: float
    before: Side
    after: Side
    ratio: float | None
    """Speed after / speed before."""
    ratio_ci95: Interval | None
    same_tokens: bool | None
    """At temperature 0: both said what plain decoding says."""

    @property
    def accepted(self) -> str:
        """How often, in words."""
        gain = self.after.alpha - self.before.alpha
        if abs(gain) < LEAST_GAIN:
            return "no more often"
        return "more often" if gain > 0 else "less often"

    @property
    def fast(self) -> str:
        """How fast, in words; what lies within the noise is no gain."""
        interval = self.ratio_ci95
        if interval is not None and interval.low > 1:
            return "faster"
        slower = interval is not None and interval.high < 1
        return "slower" if slower else "not measurably faster"


# --------------------------------------------------------------------------- measuring


def target_texts(
    target: Target,
    items: Iterable[Item],
    samplers: Iterable[Sampler],
    *,
    max_new_tokens: int,
    seed: int,
) -> dict[float, tuple[Trajectory, ...]]:
    """What the target says to these prompts, by temperature."""
    requests = [CollectRequest(prompt_id=item.prompt, prompt=item.tokens) for item in items]
    settings = CollectSettings(
        forcing="sample",
        temperatures=tuple(sampler.temperature for sampler in samplers),
        max_new_tokens=max_new_tokens,
        top_k=1,  # whole laws are read when they are compared
        seed=seed,
    )
    made = TransformersBackend(target).collect(requests, settings)
    return {
        temperature: tuple(text for text in made if text.temperature == temperature)
        for temperature in settings.temperatures
    }


def alphas(target: Target, draft: Path, texts: Texts) -> dict[float, float]:
    """The draft model's expected acceptance on these texts, by temperature.

    Raises:
        BackendError: the folder holds no model that can be loaded.
    """
    dtype: Any = str(target.dtype).removeprefix("torch.")
    model = open_target(ModelOptions(target=str(draft), dtype=dtype, device=str(target.device)))
    return {
        temperature: measure_acceptance(
            target, model, some, MeasureOptions(sampler=Sampler(temperature=temperature))
        ).alpha
        for temperature, some in texts.items()
    }


def find_changes(
    records: Sequence[RunRecord], before: Mapping[float, float], after: Mapping[float, float]
) -> tuple[Change, ...]:
    """Put together: records of plain decoding, BEFORE and AFTER; alphas by temperature."""
    found = {(entry.name, entry.temperature): entry for entry in figures(records)}

    def side(name: str, temperature: float, alpha: float) -> Side:
        entry: DrafterFigures = found[name, temperature]
        return Side(
            alpha=alpha,
            tokens_per_step=entry.tokens_per_step,
            speedup=entry.speedup,
            speedup_ci95=entry.speedup_ci95,
        )

    def change(temperature: float) -> Change:
        old, new = (
            [r for r in records if (r.drafter, r.temperature) == (name, temperature)]
            for name in (BEFORE, AFTER)
        )
        paces = paired_paces(old, new)
        same = [found[name, temperature].identical_to_autoregressive for name in (BEFORE, AFTER)]
        return Change(
            temperature=temperature,
            before=side(BEFORE, temperature, before[temperature]),
            after=side(AFTER, temperature, after[temperature]),
            ratio=weighted_speedup(paces),
            ratio_ci95=bootstrap_interval(paces),
            same_tokens=None if None in same else all(same),
        )

    return tuple(change(t) for name, t in found if name == BASELINE)
