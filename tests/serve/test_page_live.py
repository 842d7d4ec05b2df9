"""The page with the server that it is made for: what one says, the other understands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.live.config import LiveConfig
from draftsmith.live.translator import LiveTranslator
from tests.serve.driving import Page, until
from tests.serve.serving import Served, name_of

pytestmark = pytest.mark.full


@pytest.fixture
def served() -> Iterator[Served]:
    """A server for each test: a page takes up the session that it finds at its address."""
    with Served() as one:
        yield one


@pytest.fixture
def live(browser: Any, served: Served) -> Page:
    return Page(browser, served.url)


def final_text(served: Served, source: str, bias: float) -> str:
    """A translator of its own says this."""
    alone = LiveTranslator(
        served.manager.target, served.manager.template("cats"), LiveConfig(bias=bias)
    )
    update = alone.update(source, final=True)
    assert update is not None and update.shown
    return update.shown


def test_what_is_typed_is_translated(live: Page, served: Served) -> None:
    live.slide("bias", 0)
    until(lambda: served.manager.find(name_of(served)).wanted.bias == 0)
    live.type("right\n")
    expected = final_text(served, "right", 0.0)
    until(lambda: live.joined(0, ".stable") == expected)
    assert live.row(0, ".source") == "right"
    live.type("mat and log\n")
    expected = final_text(served, "mat and log", 0.0)
    until(lambda: live.joined(1, ".stable") == expected)
    live.browser.refresh()
    until(lambda: live.joined(1, ".stable") == expected)
    assert live.complaints() == []


def test_dials_and_gauges_are_the_servers(live: Page, served: Served) -> None:
    session = served.manager.find(name_of(served))
    live.slide("mask", 2)
    live.slide("bias", 0)
    until(lambda: (session.wanted.mask_k, session.wanted.bias) == (2, 0))
    live.type("mat and log")
    until(lambda: live.row(0, ".held"))
    live.type("\n")
    until(lambda: live.row(0, ".held") == "" and live.row(0, ".translation"))
    live.click("#measure")
    until(lambda: live.text("#speedup") != "–")
    live.slide("bias", 0.5)
    until(lambda: "quality" in (live.text("#banner") or ""))
    assert live.text("#updates") != "0"


def test_what_does_not_fit_is_named_and_what_was_there_stays(live: Page, served: Served) -> None:
    live.type("right")
    until(lambda: live.row(0, ".translation"))
    live.paste("typed", "the " * 900)
    live.type("\n")
    until(lambda: "too long" in (live.text("#banner") or ""))
    assert live.row(0, ".note") == "could not be translated" and live.row(0, ".translation")


def test_a_server_that_ends_leaves_the_text_on_the_page(live: Page, served: Served) -> None:
    live.type("right\n")
    until(lambda: live.row(0, ".translation"))
    shown = live.row(0, ".translation")
    served.server.should_exit = True
    until(lambda: live.text("#status") == "away")
    assert live.row(0, ".translation") == shown
