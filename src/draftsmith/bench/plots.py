"""The figures of a report, drawn with matplotlib: for a page, and as PNG and SVG files.

On a page the ink is the text colour of whatever theme the reader uses: figures are drawn with a
stand-in colour that is replaced by `currentColor`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from draftsmith.bench import charts
from draftsmith.bench.report import Report
from draftsmith.provenance import atomic_path

_INK = "#010203"  # the stand-in colour; nothing else uses it
_PAPER_INK = "#222222"
_STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}
_INKED = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One drawn figure."""

    name: str
    """Of its files."""
    title: str
    caption: str
    page_svg: str
    """For inside a page: no outer file, no links, the page's ink."""
    file_svg: str
    png: bytes

    def save(self, folder: Path) -> None:
        """Write NAME.svg and NAME.png, each whole or not at all."""
        for suffix, data in ((".svg", self.file_svg.encode()), (".png", self.png)):
            with atomic_path(folder / f"{self.name}{suffix}") as part:
                part.write_bytes(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    name: str
    title: str
    caption: str
    draw: Callable[[Report], Figure | None]


def pictures(report: Report) -> tuple[Picture, ...]:
    """All figures for which the records hold something to show."""
    out = []
    for plot in _PLOTS:
        page = _draw(plot, report, _INK, "svg")
        if page is None:
            continue
        png = _draw(plot, report, _PAPER_INK, "png")
        assert png is not None
        svg = page.decode()
        out.append(
            Picture(
                name=plot.name,
                title=plot.title,
                caption=plot.caption,
                page_svg=_for_page(svg),
                file_svg=svg.replace(_INK, _PAPER_INK),
                png=png,
            )
        )
    return tuple(out)


def _draw(plot: _Plot, report: Report, ink: str, kind: str) -> bytes | None:
    style = {**_STYLE, **dict.fromkeys(_INKED, ink), "svg.hashsalt": plot.name}
    with matplotlib.rc_context(style):
        figure = plot.draw(report)
        return None if figure is None else _render(figure, kind)


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    clear = {"transparent": True} if kind == "svg" else {"facecolor": "white"}
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata, **clear)
    return buffer.getvalue()


def _for_page(svg: str) -> str:
    """The bare <svg> element in the page's ink; namespaces and metadata are links, so they go."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = body.replace("xlink:href", "href").replace(_INK, "currentColor")
    # the page decides the width, the view box keeps the proportions
    return re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", re.sub(r'\sheight="[\d.]+pt"', "", body))


_PLOTS = (
    _Plot(
        name="speedup",
        title="Speed-up",
        caption="Decoding seconds per token of plain decoding over those of the drafter; whiskers "
        "are 95 % bootstrap intervals over prompts. The dashed line is plain decoding.",
        draw=charts.speedup,
    ),
    _Plot(
        name="tokens_per_step",
        title="Tokens per step",
        caption="Generated tokens per forward of the target. Plain decoding has 1.",
        draw=charts.tokens_per_step,
    ),
    _Plot(
        name="acceptance_by_position",
        title="Acceptance by position",
        caption="How often a drafted token is accepted, given that all before it were "
        f"(places offered at least {charts.FEW} times).",
        draw=charts.positions,
    ),
    _Plot(
        name="time_breakdown",
        title="Where the time goes",
        caption="Decoding time per token: target forwards, drafting, verifying, and the rest of "
        "the loop. Transformers does not say how it spends its time.",
        draw=charts.breakdown,
    ),
    _Plot(
        name="predicted_measured",
        title="Predicted and measured",
        caption="The speed-up that the separately measured cost table predicts from the steps "
        "taken, beside the one measured; the band is 10 % wide on either side.",
        draw=charts.predicted,
    ),
    _Plot(
        name="divergence_gaps",
        title="Near-ties",
        caption="Where greedy output differed from plain decoding: how far the target held its "
        "first choice above the second. Left of the bound, rounding explains the difference.",
        draw=charts.gaps,
    ),
)
