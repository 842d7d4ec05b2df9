"""Drawing one figure with matplotlib: for a page, and as PNG and SVG files.

On a page the ink is the text colour of whatever theme the reader uses: figures are drawn with a
stand-in colour that is replaced by `currentColor`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import matplotlib
from matplotlib.figure import Figure

from draftsmith.provenance import atomic_path

Absent = TypeVar("Absent")

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
class PlotImage:
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
class Plot:
    """What a figure is called, and what is said below it."""

    name: str
    title: str
    caption: str


def draw(plot: Plot, figure: Callable[[], Figure | Absent]) -> PlotImage | Absent:
    """Draw it twice, for a page and for paper; or hand on what came in place of a figure."""
    page = _drawn(plot, figure, _INK, "svg")
    if not isinstance(page, bytes):
        return page
    png = _drawn(plot, figure, _PAPER_INK, "png")
    assert isinstance(png, bytes)
    svg = page.decode()
    return PlotImage(
        name=plot.name,
        title=plot.title,
        caption=plot.caption,
        page_svg=_for_page(svg),
        file_svg=svg.replace(_INK, _PAPER_INK),
        png=png,
    )


def _drawn(
    plot: Plot, figure: Callable[[], Figure | Absent], ink: str, kind: str
) -> bytes | Absent:
    style = {**_STYLE, **dict.fromkeys(_INKED, ink), "svg.hashsalt": plot.name}
    with matplotlib.rc_context(style):
        made = figure()
        return _render(made, kind) if isinstance(made, Figure) else made


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
