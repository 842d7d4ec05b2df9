"""The architecture diagram: an inline SVG drawn from the text block in the page.

    2 cli -> commands               a line is a box: its column, its name, and what it imports

    2 commands -> serve live        a blank line begins the next floor

A test (`tests/docs/test_architecture_page.py`) compares the arrows with the imports of the package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

FENCE = re.compile(r"```architecture\n(.*?)```", re.DOTALL)
COLUMN, FLOOR, BOX_HEIGHT = 160, 66, 34


@dataclass(frozen=True)
class Diagram:
    """Boxes on floors, counted from the top, and the arrows between them."""

    places: dict[str, tuple[int, int]]
    """Column (from 1) and floor (from 0) of each box."""
    arrows: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Diagram:
        """
        Raises:
            ValueError: an arrow leads to a box that is not there, or not to a lower floor.
        """
        places, arrows = {}, []
        for floor, block in enumerate(re.split(r"\n\s*\n", text.strip())):
            for line in block.splitlines():
                box, _, imported = line.partition("->")
                column, name = box.split()
                places[name] = (int(column), floor)
                arrows += [(name, one) for one in imported.split()]
        for upper, lower in arrows:
            if lower not in places:
                raise ValueError(f"the arrow {upper} -> {lower} leads to a box that is not there")
            if places[lower][1] <= places[upper][1]:
                raise ValueError(f"the arrow {upper} -> {lower} does not point down")
        return cls(places=places, arrows=tuple(arrows))

    def reachable(self) -> set[tuple[str, str]]:
        """Every pair of boxes that a path of arrows joins."""
        pairs = set(self.arrows)
        while more := {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs:
            pairs |= more
        return pairs


def in_page(markdown: str) -> Diagram:
    """The diagram of a page.

    Raises:
        ValueError: the page has none, or more than one.
    """
    (text,) = FENCE.findall(markdown)
    return Diagram.parse(text)


def fill(markdown: str) -> str:
    """The page with the block replaced by its picture."""
    return FENCE.sub(lambda found: svg(Diagram.parse(found[1])), markdown)


def svg(diagram: Diagram) -> str:
    """One line of HTML; colours are the theme's, so both colour schemes show it."""
    centres = {
        name: ((column - 0.5) * COLUMN, floor * FLOOR + BOX_HEIGHT)
        for name, (column, floor) in diagram.places.items()
    }
    parts = [_arrow(centres[upper], centres[lower]) for upper, lower in diagram.arrows]
    parts += [_box(name, *centre) for name, centre in centres.items()]
    left = min(x - box_width(name) / 2 for name, (x, _) in centres.items()) - 2
    width = max(x + box_width(name) / 2 for name, (x, _) in centres.items()) + 2 - left
    height = max(floor + 1 for _, floor in diagram.places.values()) * FLOOR
    words = escape("; ".join(f"{upper} imports {lower}" for upper, lower in diagram.arrows))
    head = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="var(--md-default-fg-color--light)"/>'
        "</marker>"
    )
    return (
        f'<div class="diagram"><svg role="img" aria-label="{words}" '
        f'viewBox="{left:.0f} 0 {width:.0f} {height}" '
        f'xmlns="http://www.w3.org/2000/svg"><defs>{head}</defs>{"".join(parts)}</svg></div>'
    )


def box_width(name: str) -> float:
    """As wide as others, or as its text."""
    return max(COLUMN - 28, 7.6 * len(name) + 20)


def _box(name: str, x: float, y: float) -> str:
    width = box_width(name)
    left, top = x - width / 2, y - BOX_HEIGHT / 2
    return (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="5" '
        'fill="var(--md-code-bg-color)" stroke="var(--md-primary-fg-color)"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="14" '
        f'fill="var(--md-default-fg-color)">{escape(name)}</text>'
    )


def _arrow(upper: tuple[float, float], lower: tuple[float, float]) -> str:
    x, y = upper[0], upper[1] + BOX_HEIGHT / 2
    to_x, to_y = lower[0], lower[1] - BOX_HEIGHT / 2
    bend = (to_y - y) / 2
    return (
        f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} '
        f'{to_x:.0f} {to_y:.0f}" fill="none" stroke="var(--md-default-fg-color--light)" '
        'marker-end="url(#tip)"/>'
    )
