"""The figures of a comparison, as pictures. One whose data are missing is left out, with a reason.

All are of one scope (target and decoding temperature).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import matplotlib

from draftsmith.bench import compare_charts as charts
from draftsmith.bench.compare_axes import MAX_LINES
from draftsmith.bench.compare_charts import Drawn
from draftsmith.bench.compare_figures import Scope
from draftsmith.bench.plots import _INK, _INKED, _PAPER_INK, _STYLE, Picture, _for_page, _render


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """A figure that was left out."""

    title: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    name: str
    title: str
    caption: str
    draw: Callable[[Scope], Drawn]


def pictures(scope: Scope) -> tuple[tuple[Picture, ...], tuple[Missing, ...]]:
    """All figures for which there is something to show, and the others with reasons."""
    drawn, missing = [], []
    for plot in _PLOTS:
        page = _draw(plot, scope, _INK, "svg")
        if isinstance(page, str):
            missing.append(Missing(title=plot.title, reason=page))
            continue
        png = _draw(plot, scope, _PAPER_INK, "png")
        assert isinstance(png, bytes)
        svg = page.decode()
        drawn.append(
            Picture(
                name=plot.name,
                title=plot.title,
                caption=plot.caption,
                page_svg=_for_page(svg),
                file_svg=svg.replace(_INK, _PAPER_INK),
                png=png,
            )
        )
    return tuple(drawn), tuple(missing)


def _draw(plot: _Plot, scope: Scope, ink: str, kind: str) -> bytes | str:
    style = {**_STYLE, **dict.fromkeys(_INKED, ink), "svg.hashsalt": plot.name}
    with matplotlib.rc_context(style):
        figure = plot.draw(scope)
        return figure if isinstance(figure, str) else _render(figure, kind)


_PLOTS = (
    _Plot(
        name="objectives",
        title="Objectives",
        caption="The best setting of each objective, with one trajectory per prompt and with "
        "several. The centre is not zero: read the rings.",
        draw=charts.radar_objectives,
    ),
    _Plot(
        name="forcing",
        title="Forcing strategies",
        caption="Where the tokens of the trajectories came from; all else equal, the best beam "
        "width of each. Bars begin at plain decoding; whiskers are 95 % intervals over seeds.",
        draw=charts.forcing,
    ),
    _Plot(
        name="beams",
        title="Beam width",
        caption="Lines join settings that differ in the width alone; whiskers are 95 % intervals "
        f"over seeds. At most {MAX_LINES} lines, the best.",
        draw=charts.beams,
    ),
    _Plot(
        name="alpha_tau",
        title="Acceptance and tokens per step",
        caption="One bubble per setting, its area by beam width.",
        draw=charts.bubbles,
    ),
    _Plot(
        name="temperature",
        title="Temperature of the teacher",
        caption="Lines join settings that differ in this temperature alone.",
        draw=charts.temperature,
    ),
    _Plot(
        name="truncation",
        title="Truncated and whole laws",
        caption="Settings that differ in how many of the teacher's tokens were kept, side by side.",
        draw=charts.truncation,
    ),
    _Plot(
        name="storage",
        title="Storage",
        caption="What the trajectories took on disk.",
        draw=charts.storage,
    ),
    _Plot(
        name="quality",
        title="Quality of the draft model's own texts",
        caption="The best-ranked setting of each objective. The target's texts do not change: "
        "decoding is lossless.",
        draw=charts.quality,
    ),
    _Plot(
        name="languages",
        title="Languages",
        caption="The best setting of each objective, per language. The centre is not zero: read "
        "the rings.",
        draw=charts.radar_languages,
    ),
    _Plot(
        name="gain_by_language",
        title="Gain by language",
        caption="Bars: the setting that ranks first over all. Marks: the best setting of that "
        "language, chosen after the fact, so a little flattered.",
        draw=charts.gains,
    ),
    _Plot(
        name="gain_by_group",
        title="Gain by script, morphology, region and family",
        caption="Percent over the undistilled draft: mean over the languages of the group (their "
        "number in brackets), with the setting that ranks first over all.",
        draw=charts.gain_groups,
    ),
)
