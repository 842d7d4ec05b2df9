"""The figures of a comparison, as pictures. One whose data are missing is left out, with a reason.

All are of one scope (target and decoding temperature).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from draftsmith.bench import compare_charts as charts
from draftsmith.bench.compare_axes import MAX_LINES
from draftsmith.bench.compare_charts import Drawn
from draftsmith.bench.compare_figures import Scope
from draftsmith.bench.pictures import Picture, Plot, draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A figure that was left out."""

    title: str
    reason: str


def pictures(scope: Scope) -> tuple[tuple[Picture, ...], tuple[Missing, ...]]:
    """All figures for which there is something to show, and the others with reasons."""
    drawn, missing = [], []
    for plot, chart in _PLOTS:
        found = draw(plot, partial(chart, scope))
        if isinstance(found, str):
            missing.append(Missing(title=plot.title, reason=found))
        else:
            drawn.append(found)
    return tuple(drawn), tuple(missing)


_PLOTS: tuple[tuple[Plot, Callable[[Scope], Drawn]], ...] = (
    (
        Plot(
            name="objectives",
            title="Objectives",
            caption="The best setting of each objective, with one trajectory per prompt and with "
            "several. The centre is not zero: read the rings.",
        ),
        charts.radar_objectives,
    ),
    (
        Plot(
            name="forcing",
            title="Forcing strategies",
            caption="Where the tokens of the trajectories came from; all else equal, the best beam "
            "width of each. Bars begin at plain decoding; whiskers are 95 % intervals over seeds.",
        ),
        charts.forcing,
    ),
    (
        Plot(
            name="beams",
            title="Beam width",
            caption="Lines join settings that differ in the width alone; whiskers are 95 % "
            f"intervals over seeds. At most {MAX_LINES} lines, every objective's fullest first.",
        ),
        charts.beams,
    ),
    (
        Plot(
            name="alpha_tau",
            title="Acceptance and tokens per step",
            caption="One bubble per setting, its area by beam width.",
        ),
        charts.bubbles,
    ),
    (
        Plot(
            name="speedup",
            title="Speed-up",
            caption="The fastest setting of each objective and network, and all other drafters "
            "that were timed; whiskers are 95 % intervals over seeds. The line is plain decoding.",
        ),
        charts.speedups,
    ),
    (
        Plot(
            name="temperature",
            title="Temperature of the teacher",
            caption="Lines join settings that differ in this temperature alone.",
        ),
        charts.temperature,
    ),
    (
        Plot(
            name="truncation",
            title="Truncated and whole laws",
            caption="Settings that differ in how many of the teacher's tokens were kept, side "
            "by side.",
        ),
        charts.truncation,
    ),
    (
        Plot(
            name="storage",
            title="Storage",
            caption="What the trajectories took on disk.",
        ),
        charts.storage,
    ),
    (
        Plot(
            name="quality",
            title="Quality of the draft model's own texts",
            caption="The best-ranked setting of each objective. The target's texts do not change: "
            "decoding is lossless.",
        ),
        charts.quality,
    ),
    (
        Plot(
            name="languages",
            title="Languages",
            caption="The best setting of each objective, per language. The centre is not zero: "
            "read the rings.",
        ),
        charts.radar_languages,
    ),
    (
        Plot(
            name="gain_by_language",
            title="Gain by language",
            caption="Bars: the setting that ranks first over all. Marks: the best setting of that "
            "language, chosen after the fact, so a little flattered.",
        ),
        charts.gains,
    ),
    (
        Plot(
            name="gain_by_group",
            title="Gain by script, morphology, region and family",
            caption="Percent over the undistilled draft: mean over the languages of the group "
            "(their number in brackets), with the setting that ranks first over all.",
        ),
        charts.gain_groups,
    ),
)
