"""The picture of the page in the documents, taken on demand.

    LIVE_PAGE_PICTURE=script python -m pytest tests/serve/test_page_picture.py

plays a conversation that is written below: text and times are made up, NE, A/D and A/O follow from
it, a word being a token. With the address of a live server instead, its own translation of the
sample is taken, and everything is real.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.records import UpdateRecord
from draftsmith.rows import common_prefix
from tests.serve.driving import until
from tests.serve.fake_server import FakeServer

PICTURE = Path(__file__).parents[2] / "docs" / "live-page.png"
WANTED = os.environ.get("LIVE_PAGE_PICTURE", "")
SCRIPT = """
Good morning,
    Guten Morgen,
Good morning, and thank you
    Guten Morgen, und danke
Good morning, and thank you for coming.
    Guten Morgen, und danke, dass Sie gekommen sind.

Today I want
    Heute will ich
Today I want to tell you about
    Heute will ich Ihnen erzählen
Today I want to tell you about a small house by the sea.
    Heute will ich Ihnen von einem kleinen Haus am Meer erzählen.

My grandfather built it
    Mein Großvater baute es
My grandfather built it with his own hands,
    Mein Großvater baute es mit eigenen Händen,
My grandfather built it with his own hands, and it took him three years.
    Mein Großvater baute es mit eigenen Händen, und er brauchte dafür drei Jahre.

Every summer we went
    Jeden Sommer gingen wir
Every summer we went there with the whole family.
    Jeden Sommer fuhren wir mit der ganzen Familie dorthin.

The children slept under
    Die Kinder schliefen
The children slept under the roof,
    Die Kinder schliefen unter dem Dach,
The children slept under the roof, where you could hear the rain.
    Die Kinder schliefen unter dem Dach, wo man den Regen hörte.

In the evening
    Am Abend
In the evening my grandmother told us stories,
    Am Abend erzählte uns meine Großmutter Geschichten,
In the evening my grandmother told us stories, and nobody wanted to go to bed.
    Am Abend erzählte uns meine Großmutter Geschichten, und niemand wollte ins Bett.

One day a young man
    Eines Tages kam ein junger Mann
One day a young man came to the door and asked
    Eines Tages stand ein junger Mann vor der Tür und bat
"""
HIDDEN = " um ein"


def revisions() -> Iterator[UpdateRecord]:
    """What the script says; a word counts as a token."""
    parts = [part.splitlines() for part in SCRIPT.strip().split("\n\n")]
    for seg, lines in enumerate(parts):
        drafted: list[str] = []
        pairs = list(zip(lines[::2], lines[1::2], strict=True))
        for rev, (source, text) in enumerate(pairs):
            words = text.split()
            yield UpdateRecord(
                seg=seg,
                rev=rev,
                source=source,
                shown=text.strip(),
                full=text.strip(),
                final=source.endswith("."),
                tokens=len(words),
                drafted=len(drafted),
                accepted=common_prefix(drafted, words),
            )
            drafted = words


def show(server: FakeServer, records: list[UpdateRecord], hidden: str = "") -> None:
    """Tell the last of these, with the figures of all."""
    so_far, one = report(records, CHARACTERS), records[-1]
    before = records[-2].shown if one.rev else ""
    server.update(
        one.seg,
        one.rev,
        one.source,
        one.shown,
        stable=common_prefix(before, one.shown),
        hidden=hidden,
        final=one.final,
        ms=24 + 9 * (one.tokens - one.accepted),
        ne=so_far.erasure_macro,
        ad=so_far.accepted_of_drafted,
        ao=so_far.accepted_of_tokens,
    )


@pytest.mark.skipif(not WANTED, reason="takes a picture when LIVE_PAGE_PICTURE is set")
def test_take_the_picture(browser: Any, server: FakeServer) -> None:
    size = {"width": 1360, "height": 850, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    still = {"name": "prefers-reduced-motion", "value": "reduce"}  # underlines that do not fade
    light = {"name": "prefers-color-scheme", "value": "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [still, light]})

    def run(script: str) -> Any:
        return browser.execute_script(script)

    if WANTED == "script":
        server.model, server.settings["mask_k"] = "a scripted conversation", 2
        browser.get(server.url)
        until(lambda: server.of("start"))
        run("document.getElementById('held').click()")
        records = list(revisions())
        for end in range(1, len(records)):
            show(server, records[:end])
        until(lambda: run("return document.querySelectorAll('.row').length") > records[-1].seg)
        show(server, records, HIDDEN)
        until(lambda: run("return document.querySelector('.held:not(:empty)')"))
    else:
        browser.get(WANTED)
        run("document.getElementById('try').click()")
        until(lambda: run("return document.querySelectorAll('.row').length") >= 4)
        run("document.getElementById('measure').click()")
        until(lambda: run("return document.getElementById('speedup').textContent") != "–")
        until(lambda: run("return document.querySelector('.open .changed')"))
    PICTURE.write_bytes(browser.get_screenshot_as_png())
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
