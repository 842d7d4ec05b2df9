"""What readers take along, and what they see on another screen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.serve.driving import Page, until
from tests.serve.fake_server import FakeServer

pytestmark = pytest.mark.full

# --------------------------------------------------------------------------- history


def test_downloads(page: Page, server: FakeServer, downloads: Path) -> None:
    server.update(0, 0, "One & only.", "Eins & <einzig>.", final=True)
    server.update(1, 0, "Two", "Zwei 😀")
    until(lambda: page.row(1, ".translation") == "Zwei 😀")
    found = {}
    for ending in ("txt", "srt", "vtt", "jsonl"):
        page.click(f"[data-format={ending}]")
        path = downloads / f"translation.{ending}"
        until(lambda path=path: path.exists() and path.stat().st_size)
        found[ending] = path.read_text(encoding="utf-8")
    assert found["txt"] == "Eins & <einzig>.\nZwei 😀\n"
    cue = r"\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"1\n{cue}\nEins & <einzig>\.\n\n2\n{cue}\nZwei 😀\n", found["srt"])
    assert found["vtt"].startswith("WEBVTT\n\n")
    assert "Eins &amp; &lt;einzig&gt;." in found["vtt"]
    lines = [json.loads(line) for line in found["jsonl"].splitlines()]
    assert [(one["source"], one["text"], one["final"]) for one in lines] == [
        ("One & only.", "Eins & <einzig>.", True),
        ("Two", "Zwei 😀", False),
    ]


# --------------------------------------------------------------------------- overlay


def test_the_overlay_reads_the_mirror_alone(browser: Any, server: FakeServer) -> None:
    for seg in range(3):
        server.an_update(seg, 0, "x", f"Zeile {seg}. <b>", final=True)
    browser.get(f"{server.url}?view=overlay&lines=2&bg=transparent&session=session-1")

    def lines() -> list[str]:
        script = "return [...document.querySelectorAll('#overlay p')].map((e) => e.textContent)"
        found: list[str] = browser.execute_script(script)
        return found

    until(lambda: lines() == ["Zeile 0. <b>", "Zeile 1. <b>", "Zeile 2. <b>"])
    script = "const e = document.getElementById('overlay'); const s = getComputedStyle(e);"
    height = "return e.clientHeight / parseFloat(s.lineHeight)"
    assert browser.execute_script(script + height) == pytest.approx(2, abs=0.1)
    background = "return getComputedStyle(document.documentElement).backgroundColor"
    assert browser.execute_script(background) == "rgba(0, 0, 0, 0)"
    assert not browser.find_element("css selector", ".top").is_displayed()
    server.an_update(3, 0, "x", "Neu")
    until(lambda: lines()[-1] == "Neu")
    assert not any(path.startswith("/ws") for path in server.asked)
    assert server.received == []


def test_the_overlay_keeps_its_text_while_the_server_is_away(
    browser: Any, server: FakeServer
) -> None:
    server.an_update(0, 0, "x", "Eins")
    browser.get(f"{server.url}?view=overlay&bg=%2300ff00&session=session-1")
    script = "return document.getElementById('overlay').textContent"
    until(lambda: browser.execute_script(script) == "Eins")
    background = "return getComputedStyle(document.documentElement).backgroundColor"
    assert browser.execute_script(background) == "rgb(0, 255, 0)"
    server.session, asked = "another", len(server.asked)
    until(lambda: len(server.asked) >= asked + 2)  # refused, and tried again
    assert browser.execute_script(script) == "Eins"
    server.session = "session-1"
    server.an_update(0, 1, "x y", "Eins zwei")
    until(lambda: browser.execute_script(script) == "Eins zwei")
