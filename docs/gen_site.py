"""What `mkdocs build` does beyond Markdown (hooks of mkdocs.yml).

Pages get their tables of options (`gen_options`) and the diagram (`gen_diagram`). A link that
leaves `docs/` (a benchmark's page, a script, the lab log) leads to a copy under `repository/`, so
that the site is whole without the repository. A page that would load anything from the network is a
warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path

import gen_diagram
import gen_options
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)((?:#[^)]*)?)\)")
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what navigation and pages name outside of `docs/`, and what those name in turn."""
    in_nav = re.findall(r"'repository/([^']+)'", repr(config.nav))
    pages = (f"docs/{file.src_uri}" for file in files.documentation_pages())
    waiting = [*in_nav, *(target for page in pages for target in linked(page))]
    added: set[str] = set()
    while waiting:
        target = waiting.pop()
        if target.startswith("docs/") or target in added or not (ROOT / target).is_file():
            continue
        added.add(target)
        content = (ROOT / target).read_bytes()
        files.append(File.generated(config, f"repository/{target}", content=content))
        waiting += linked(target) if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links first: they are those of the page as it is written."""
    here = page.file.src_uri
    inside = here.startswith("repository/")
    source = here.removeprefix("repository/") if inside else f"docs/{here}"
    markdown = LINK.sub(lambda found: _moved(found, source, here), markdown)
    return gen_diagram.fill(gen_options.fill(markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The readable part is ours; what a page loads must be in the site."""
    for address in loaded(output):
        if re.match(r"(https?:)?//", address):
            log.warning("%s would load %s from the network", page.file.src_uri, address)
    return output


def linked(page: str) -> list[str]:
    """The files that a page of the repository links to, as paths from the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [_resolved(page, target) for _, target, _ in LINK.findall(text)]


def loaded(html: str) -> list[str]:
    """The addresses of all scripts, styles, images and frames of a page."""
    collector = _Loads()
    collector.feed(html)
    return collector.addresses


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
        self.addresses += [value for name, value in attrs if name == names.get(tag) and value]


def _resolved(page: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _moved(found: re.Match[str], source: str, here: str) -> str:
    """The link as the built page must have it: the place of a file in the site, not in the
    repository. Of a link to a folder the words stay."""
    words, address, anchor = found.groups()
    target = _resolved(source, address)
    if (ROOT / target).is_dir():
        return words
    if not (ROOT / target).exists():
        return found[0]
    place = target.removeprefix("docs/") if target.startswith("docs/") else f"repository/{target}"
    relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
    return f"[{words}]({relative}{anchor})"
