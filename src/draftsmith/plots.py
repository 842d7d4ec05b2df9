"""The style that all plots share; matplotlib draws each for a page, and as PNG and SVG files.

Each package has a `plots.py` with functions that build one matplotlib figure; `plot` gives such a
function its name, title and caption. On a page the ink is the text colour of whatever theme the
reader uses: figures are drawn in a stand-in colour that is replaced by `currentColor`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from draftsmith.provenance import atomic_path

P = ParamSpec("P")
Absent = TypeVar("Absent")

GREY = "#8c8c8c"
# Okabe and Ito: told apart by colour-blind readers, and of middle lightness on both themes
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
DASHED = (0, (4, 3))
MARK: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2}
"""A value beside that of a bar."""

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
    """A drawn plot."""

    name: str
    """Stem of its files."""
    title: str
    caption: str
    page_svg: str
    """Stands inside a page: no outer file, no links, the page's ink."""
    file_svg: str
    png: bytes

    def save(self, folder: Path) -> None:
        """Write NAME.svg and NAME.png, atomically."""
        for suffix, data in ((".svg", self.file_svg.encode()), (".png", self.png)):
            with atomic_path(folder / f"{self.name}{suffix}") as part:
                part.write_bytes(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot(Generic[P, Absent]):
    """A function that builds a figure, with what readers see around it."""

    name: str
    """Stem of the files."""
    title: str
    caption: str
    figure: Callable[P, Figure | Absent]
    """Returns a figure, or something else where there is nothing to show."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Figure | Absent:
        """Build the figure in whatever style is set."""
        return self.figure(*args, **kwargs)

    def draw(self, *args: P.args, **kwargs: P.kwargs) -> PlotImage | Absent:
        """Draw the figure twice, for a page and for paper; or return what came in its place."""

        def render(ink: str, kind: str) -> bytes | Absent:
            style = {**_STYLE, **dict.fromkeys(_INKED, ink), "svg.hashsalt": self.name}
            with matplotlib.rc_context(style):
                figure = self.figure(*args, **kwargs)
                return _render(figure, kind) if isinstance(figure, Figure) else figure

        page = render(_INK, "svg")
        if not isinstance(page, bytes):
            return page
        png, svg = render(_PAPER_INK, "png"), page.decode()
        assert isinstance(png, bytes)
        return PlotImage(
            name=self.name,
            title=self.title,
            caption=self.caption,
            page_svg=_for_page(svg),
            file_svg=svg.replace(_INK, _PAPER_INK),
            png=png,
        )


def plot(
    *, name: str, title: str, caption: str | None = None
) -> Callable[[Callable[P, Figure | Absent]], Plot[P, Absent]]:
    """Make a plot of the decorated function. Its docstring is the caption; one that holds values
    of the code is given as `caption` instead."""

    def decorate(figure: Callable[P, Figure | Absent]) -> Plot[P, Absent]:
        text = caption or " ".join((figure.__doc__ or "").split())
        assert text, f"the plot {name} has neither a caption nor a docstring"
        return Plot(name=name, title=title, caption=text, figure=figure)

    return decorate


def ink() -> str:
    """The text colour of the drawing that is being made."""
    return str(matplotlib.rcParams["text.color"])


def blank(width: float, height: float) -> Figure:
    """An empty figure (inches) that makes room for its labels."""
    return Figure(figsize=(width, height), layout="constrained")


def panel(width: float, height: float, **subplot: Any) -> tuple[Figure, Any]:
    """An empty figure with one axis."""
    figure = blank(width, height)
    return figure, figure.subplots(subplot_kw=subplot)


def light_grid(axis: Any, which: str = "y") -> None:
    """Draw thin grid lines behind the marks."""
    axis.grid(axis=which, color=GREY, alpha=0.25, linewidth=0.6)


def reference(**style: Any) -> dict[str, Any]:
    """Return keywords of a thin line that marks are read against; `style` may change them."""
    return {"color": ink(), "linewidth": 0.9, "linestyle": DASHED, **style}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A horizontal bar, named on the left, with a text on its right."""

    name: str
    value: float | None
    """None: a row without a bar."""
    text: str
    colour: str = COLOURS[0]
    alpha: float = 1.0
    half: float | tuple[float, float] | None = None
    """What the whisker covers on both sides, or on the left and on the right."""
    mark: float | None = None
    """Another value in this row."""


def bar_rows(axis: Any, bars: Sequence[Bar], *, beyond: float = 0.0) -> None:
    """Draw bars, the first on top; texts begin behind bar, whisker and mark, and at `beyond`."""
    for place, bar in enumerate(reversed(bars)):
        ends = [beyond] if bar.mark is None else [beyond, bar.mark]
        if bar.value is not None:
            axis.barh(place, bar.value, color=bar.colour, alpha=bar.alpha, height=0.62)
            left, right = bar.half if isinstance(bar.half, tuple) else (bar.half or 0.0,) * 2
            ends.append(bar.value + right)
            if left or right:
                style = {"color": ink(), "capsize": 3, "linewidth": 1.2}
                axis.errorbar(bar.value, place, xerr=[[left], [right]], **style)
        if bar.mark is not None:
            axis.plot(bar.mark, place, linestyle="none", color=ink(), **MARK)
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5}
        axis.annotate(bar.text, (max(ends), place), **beside)
    name_rows(axis, [bar.name for bar in bars])


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """Name horizontal bars; the bar at place 0, the lowest, has the last name."""
    axis.set_yticks(range(len(names)), list(reversed(names)))
    axis.tick_params(axis="y", length=0)


def legend_entry(axis: Any, name: str, **style: Any) -> None:
    """Add a name to the legend whose mark is nowhere in the plot."""
    axis.plot([], [], label=name, **{"marker": "o", "linestyle": "none", "color": ink(), **style})


def legend_below(
    figure: Figure, axes: Sequence[Any] = (), columns: int = 4, place: str = "outside lower center"
) -> None:
    """Draw one legend for these panels (none given: all), each name once."""
    found: dict[str, Any] = {}
    for axis in axes or figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(list(found.values()), list(found), loc=place, ncols=min(len(found), columns))


def _render(figure: Figure, kind: str) -> bytes:
    for text in figure.findobj(Text):  # names of models may hold dollar signs
        text.set_parse_math(False)
    for axis in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)):
        if axis.get_scale() == "log":  # powers of ten
            for text in axis.get_ticklabels(which="both"):
                text.set_parse_math(True)
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    clear = {"transparent": True} if kind == "svg" else {"facecolor": "white"}
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata, **clear)
    return buffer.getvalue()


def _for_page(svg: str) -> str:
    """Return the bare <svg> element in the page's ink, without namespaces and metadata (links)."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = body.replace("xlink:href", "href").replace(_INK, "currentColor")
    # the page decides the width, the view box keeps the proportions
    return re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", re.sub(r'\sheight="[\d.]+pt"', "", body))
