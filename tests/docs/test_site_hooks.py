"""What the hooks of mkdocs.yml add to pages is the program's own, and what they refuse is wrong."""

from __future__ import annotations

from xml.etree import ElementTree

import gen_diagram
import gen_options
import gen_site
import pytest

from draftsmith.cli import verbs
from draftsmith.config import flags_of
from draftsmith.drafters.config import kinds
from draftsmith.drafters.registry import drafter_class


def meanings(rows: list[str]) -> list[str]:
    """The last cells."""
    return [row.split("|")[-2].strip() for row in rows]


@pytest.mark.parametrize("verb", verbs())
def test_tables_of_a_verb_have_every_flag_with_a_meaning(verb: str) -> None:
    text = gen_options.fill(f"<!-- options: {verb} -->")
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert {row.split("`")[1] for row in rows} == set(flags_of(verbs()[verb]))
    assert all(meanings(rows))


@pytest.mark.parametrize("kind", kinds())
def test_the_table_of_a_drafter_has_every_option_with_a_meaning(kind: str) -> None:
    text = gen_options.fill(f"<!-- config: {kind} -->")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    names = [row.split("`")[1] for row in rows]
    assert names == list(getattr(drafter_class(kind).Config, "__dataclass_fields__", {}))
    assert all(meanings(rows))
    assert ("is trained with" in text) == drafter_class(kind).trains


def test_the_diagram_is_drawn_with_every_box_and_arrow() -> None:
    text = "2 top -> left low\n\n1 left -> low\n3 right -> low\n\n2 low\n"
    diagram = gen_diagram.Diagram.parse(text)
    assert diagram.places == {"top": (2, 0), "left": (1, 1), "right": (3, 1), "low": (2, 2)}
    assert ("right", "low") in diagram.arrows and ("top", "right") not in diagram.reachable()
    picture = gen_diagram.fill(f"```architecture\n{text}```\n")
    (svg,) = ElementTree.fromstring(picture)
    names = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert names == ["top", "left", "right", "low"]
    paths = [one for one in svg.iter("{http://www.w3.org/2000/svg}path") if one.get("marker-end")]
    assert len(paths) == len(diagram.arrows) == 4


@pytest.mark.parametrize(
    "text",
    [
        "1 top -> low\n2 low\n",  # beside
        "1 low\n\n1 top -> low\n",  # up
        "1 top -> nowhere\n\n1 low\n",
    ],
)
def test_an_arrow_that_does_not_point_down_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the arrow top ->"):
        gen_diagram.Diagram.parse(text)


def test_what_a_page_would_load_from_the_network_is_found() -> None:
    html = (
        '<link href="a.css"><script src="https://x.org/y.js"></script><img src="//x.org/z.png">'
        '<a href="https://x.org">a link loads nothing</a>'
    )
    assert gen_site.loaded(html) == ["a.css", "https://x.org/y.js", "//x.org/z.png"]


def test_links_that_leave_the_documents_lead_to_their_copies() -> None:
    links = gen_site.linked("docs/history/2026-11-lab-log.md")
    assert "LOG.md" in links and "docs/tune.md" in links
