"""What a page holds: its tags, and the places it points to."""

from __future__ import annotations

from html.parser import HTMLParser


class Collector(HTMLParser):
    """Tags and the places where a page points to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data") and v]
