"""The figures of a report. One for which the records hold nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from matplotlib.figure import Figure

from draftsmith.bench import charts
from draftsmith.bench.pictures import Picture, Plot, draw
from draftsmith.bench.report import Report


def pictures(report: Report) -> tuple[Picture, ...]:
    """All figures for which the records hold something to show."""
    drawn = (draw(plot, partial(chart, report)) for plot, chart in _PLOTS)
    return tuple(picture for picture in drawn if picture is not None)


_PLOTS: tuple[tuple[Plot, Callable[[Report], Figure | None]], ...] = (
    (
        Plot(
            name="speedup",
            title="Speed-up",
            caption="Decoding seconds per token of plain decoding over those of the drafter; "
            "whiskers are 95 % bootstrap intervals over prompts. The dashed line is plain "
            "decoding.",
        ),
        charts.speedup,
    ),
    (
        Plot(
            name="tokens_per_step",
            title="Tokens per step",
            caption="Generated tokens per forward of the target. Plain decoding has 1.",
        ),
        charts.tokens_per_step,
    ),
    (
        Plot(
            name="acceptance_by_position",
            title="Acceptance by position",
            caption="How often a drafted token is accepted, given that all before it were "
            f"(places offered at least {charts.FEW} times).",
        ),
        charts.positions,
    ),
    (
        Plot(
            name="time_breakdown",
            title="Where the time goes",
            caption="Decoding time per token: target forwards, drafting, verifying, and the "
            "rest of the loop. Transformers does not say how it spends its time.",
        ),
        charts.breakdown,
    ),
    (
        Plot(
            name="predicted_measured",
            title="Predicted and measured",
            caption="The speed-up that the separately measured cost table predicts from the steps "
            "taken, beside the one measured; the band is 10 % wide on either side.",
        ),
        charts.predicted,
    ),
    (
        Plot(
            name="divergence_gaps",
            title="Near-ties",
            caption="Where greedy output differed from plain decoding: how far the target held its "
            "first choice above the second. Left of the bound, rounding explains the difference.",
        ),
        charts.gaps,
    ),
)
