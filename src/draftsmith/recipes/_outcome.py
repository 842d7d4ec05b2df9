"""What a distillation brought, told: a table, a sentence, a part of the page, and plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from draftsmith.bench.report import Section, interval_text, number, times
from draftsmith.bench.statistics import Interval
from draftsmith.provenance import portable_text
from draftsmith.recipes._before_after import DRAFT_LENGTH, Change, Side
from draftsmith.recipes._short_distillation import Collected, Distilled


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that is to be told of a distillation."""

    draft: str
    """Folder of the draft model that it began with."""
    collected: Collected
    distilled: Distilled
    changes: tuple[Change, ...]
    prompts: int
    """That were decoded."""
    texts: int
    """Of the target, at each temperature, that alpha was computed on."""
    equality: tuple[str, ...]
    """Sentences on whether the target's text stayed the same."""

    @property
    def sentence(self) -> str:
        """What happened, in one sentence; it never says more than was measured."""
        accepted = _by_temperature((c.temperature, c.accepted) for c in self.changes)
        fast = _by_temperature((c.temperature, c.fast) for c in self.changes)
        better = any(c.accepted == "more often" or c.fast == "faster" for c in self.changes)
        said = "is" if better else "is no better: it is"
        return (
            f"After {self.distilled.seconds:.0f} s of distillation on {self.collected.tokens:,} "
            f"tokens of the target the draft model {said} accepted {accepted} than before, and "
            f"decoding with it is {fast}."
        )

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """(temperature, figure, before, after, gain)."""
        return tuple(row for change in self.changes for row in _rows(change))

    def table(self) -> Table:
        """For the terminal."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("")
        for name in ("before", "after", "gain"):
            table.add_column(name, justify="right", no_wrap=True)
        known = None
        for temperature, *cells in self.rows:
            if temperature != known:
                table.add_section()
                table.add_row(f"temperature {temperature}", style="italic")
                known = temperature
            table.add_row(*cells)
        return table

    @property
    def section(self) -> Section:
        """For the page."""
        return Section(
            title="Before and after distillation",
            sentences=(self.sentence, self.method, *self.equality),
            columns=("temperature", "figure", "before", "after", "gain"),
            rows=self.rows,
        )

    @property
    def method(self) -> str:
        """How it was measured."""
        return (
            f"Both draft models draft with --draft-length {DRAFT_LENGTH}: two tokens more after a "
            "draft that was accepted whole, one less after any other. Alpha is computed on "
            f"{_count(self.texts, 'text')} of the target at each temperature; the rest is measured "
            f"on {_count(self.prompts, 'prompt')}, decoded with both and plainly, interleaved. "
            "These prompts are from files that nothing was collected from, and that "
            "models/mini-code was not trained on."
        )

    def payload(self) -> dict[str, Any]:
        """For summary.json: plain values."""
        return {
            "sentence": self.sentence,
            "draft_length": DRAFT_LENGTH,
            "before": portable_text(self.draft),
            "after": portable_text(str(self.distilled.draft)),
            "tokens_collected": self.collected.tokens,
            "trajectories": self.collected.trajectories,
            "training_prompts": self.collected.prompts,
            "collect_seconds": self.collected.seconds,
            "steps": self.distilled.steps,
            "tokens_fed": self.distilled.tokens,
            "distil_seconds": self.distilled.seconds,
            "prompts": self.prompts,
            "texts_of_alpha": self.texts,
            "temperatures": [
                {
                    "temperature": change.temperature,
                    "before": _figures(change.before),
                    "after": _figures(change.after),
                    "speed_ratio": change.ratio,
                    "speed_ratio_ci95": _pair(change.ratio_ci95),
                    "identical_to_autoregressive": change.same_tokens,
                }
                for change in self.changes
            ],
        }


def _rows(change: Change) -> tuple[tuple[str, ...], ...]:
    temperature, before, after = f"{change.temperature:g}", change.before, change.after
    points = f"{100 * (after.alpha - before.alpha):+.1f} points"
    faster = "" if change.ratio is None else f"{100 * (change.ratio - 1):+.0f} %"
    if change.ratio_ci95 is not None:
        faster += f" ({interval_text(change.ratio_ci95)}x)"
    more = ""
    if before.tokens_per_step and after.tokens_per_step:
        more = f"{100 * (after.tokens_per_step / before.tokens_per_step - 1):+.0f} %"
    return (
        (
            temperature,
            "acceptance (alpha)",
            f"{100 * before.alpha:.1f} %",
            f"{100 * after.alpha:.1f} %",
            points,
        ),
        (
            temperature,
            "tokens per step (tau)",
            number(before.tokens_per_step),
            number(after.tokens_per_step),
            more,
        ),
        (temperature, "measured speed-up", times(before.speedup), times(after.speedup), faster),
    )


def _by_temperature(words: Iterable[tuple[float, str]]) -> str:
    """`faster at temperature 0 and no faster at temperature 0.8`."""
    where: dict[str, list[str]] = {}
    for temperature, word in words:
        where.setdefault(word, []).append(f"{temperature:g}")
    return " and ".join(
        f"{word} at temperature {' and '.join(some)}" for word, some in where.items()
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _figures(side: Side) -> dict[str, Any]:
    return {
        "alpha": side.alpha,
        "tokens_per_step": side.tokens_per_step,
        "speedup": side.speedup,
        "speedup_ci95": _pair(side.speedup_ci95),
    }


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
