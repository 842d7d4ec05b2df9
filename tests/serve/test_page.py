"""The live page in a headless browser, against a server that says what a test wants: what shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from draftsmith.serve.app import PAGE
from tests.serve.driving import Page, until
from tests.serve.fake_server import FakeServer


def test_an_update_shows_and_its_figures(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "This is an exam", "Das ist eine Prüfung", stable=8, ms=123.4, ne=0.4567)
    until(lambda: page.joined(0, ".stable") == "Das ist ")
    assert page.joined(0, ".tail") == "eine Prüfung"
    assert page.row(0, ".source") == "This is an exam"
    assert not page.shown("#empty")
    gauges = [page.text(f"#{name}") for name in ("ms", "ne", "ad", "ao", "updates")]
    assert gauges == ["123", "0.46", "80 %", "60 %", "1"]
    server.update(0, 1, "This is an example.", "Das ist ein Beispiel.", final=True, ne=None)
    until(lambda: page.joined(0, ".stable") == "Das ist ein Beispiel.")
    assert page.joined(0, ".changed") == "ein Beispiel"
    assert page.joined(0, ".tail") == ""
    assert [page.text("#ne"), page.text("#updates")] == ["–", "2"]
    assert len(page.run("return document.getElementById('spark-line').points")) == 2
    server.send({"type": "coalesced", "seg": 1, "revs": [3, 4]})
    until(lambda: page.text("#coalesced") == "2")


def test_stable_counts_code_points(page: Page, server: FakeServer) -> None:
    cases = [
        ("😀😀 gut 👩‍👩‍👧 ja", 7),
        ("我爱你。我们走吧", 4),
        ("𠮷野家で𠮷", 3),
        ("مرحبا بالعالم", 6),
        ("plain", 0),
        ("plain", 5),
    ]
    for seg, (text, stable) in enumerate(cases):
        server.update(seg, 0, "x", text, stable=stable)
        until(lambda seg=seg, text=text: page.row(seg, ".translation") == text)
        assert page.joined(seg, ".stable") == text[:stable]
        assert page.joined(seg, ".tail") == text[stable:]


def test_words_that_stay_keep_their_element(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "x", "Das ist eine Prüfung")
    until(lambda: page.row(0, ".translation") == "Das ist eine Prüfung")
    page.run("document.querySelector('.translation > span').dataset.kept = 'yes'")
    server.update(0, 1, "x y", "Das war heute eine Prüfung.")
    until(lambda: page.row(0, ".translation") == "Das war heute eine Prüfung.")
    assert page.text(".translation > [data-kept]") == "Das "
    assert page.joined(0, ".changed") == "war heute "


def test_the_hidden_tail_shows_on_demand_only(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "This is an exam", "Das ist", hidden=" eine Prüfung")
    until(lambda: page.row(0, ".held") == " eine Prüfung")
    assert not page.shown(".held")
    page.click("#held")
    assert page.shown(".held")
    server.update(0, 1, "This is an exam.", "Das ist eine Prüfung.", final=True)
    until(lambda: page.row(0, ".held") == "")


def test_markup_is_text(page: Page, server: FakeServer) -> None:
    attack = "<img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt;"
    said = {"source": attack, "text": attack, "hidden": attack, "final": False}
    server.send(server.an_update(0, 0, **{**said, "final": True}))
    server.send({"type": "error", "code": "<b>", "message": attack, "fatal": False})
    until(lambda: page.text("#banner") == attack)
    until(lambda: page.row(0, ".source") == attack)
    assert page.row(0, ".translation") == attack * 2
    assert page.text("#announcer") == ""  # it was final when it came
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0
    assert page.complaints() == []


def test_no_source_makes_markup_from_text() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"
    inline = r"\son\w+=|\sstyle=|<style|javascript:|<script(?![^>]*\ssrc=)"
    for path in PAGE.iterdir():
        pattern = f"{ways}|{inline}" if path.suffix == ".html" else ways
        found = re.search(pattern, path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found}"


def test_only_finals_are_announced(page: Page, server: FakeServer) -> None:
    for rev, (text, final) in enumerate(
        [("Das", False), ("Das ist", False), ("Das ist gut.", True)]
    ):
        server.update(0, rev, "x" * (rev + 1), text, final=final)
        until(lambda text=text: page.row(0, ".translation") == text)
    assert page.text("#announcer") == "Das ist gut."
    assert page.run("return document.querySelector('#scroll [aria-live]')") is None


def test_what_failed_says_so(page: Page, server: FakeServer) -> None:
    page.type("Hello\n")
    until(lambda: page.row(0, ".source") == "Hello")
    error = {"type": "error", "code": "backend", "message": "no memory", "fatal": False}
    server.send({**error, "rev": 0, "seg": 0})
    until(lambda: page.row(0, ".note") == "could not be translated")
    assert page.text("#banner") == "no memory"


def test_the_newest_200_segments_are_on_the_page(page: Page, server: FakeServer) -> None:
    for seg in range(230):
        server.update(seg, 0, f"s{seg}", f"t{seg}", final=True)
    until(lambda: page.row(229, ".translation") == "t229")
    rows = page.run("return [...document.querySelectorAll('.row')].map((e) => +e.dataset.seg)")
    assert rows == list(range(30, 230))
    assert page.shown("#older") or page.text("#older")


def test_the_reader_who_scrolls_up_stays_there(page: Page, server: FakeServer) -> None:
    def distance() -> float:
        script = "const e = document.getElementById('scroll'); return {}"
        return float(page.run(script.format("e.scrollHeight - e.scrollTop - e.clientHeight")))

    for seg in range(40):
        server.update(seg, 0, f"s{seg}", f"t{seg}", final=True)
    until(lambda: page.row(39, ".translation") == "t39")
    until(lambda: distance() < 2)
    page.run("document.getElementById('scroll').scrollTop = 100")
    until(lambda: page.shown("#newest"))
    for seg in range(40, 45):
        server.update(seg, 0, f"s{seg}", f"t{seg}", final=True)
    until(lambda: page.row(44, ".translation") == "t44")
    assert page.run("return document.getElementById('scroll').scrollTop") == 100
    page.click("#newest")
    until(lambda: distance() < 2)
    assert not page.shown("#newest")


# --------------------------------------------------------------------------- the whole


def test_nothing_leaves_the_server_and_the_console_is_quiet(
    page: Page, server: FakeServer, downloads: Path
) -> None:
    page.click("#try")
    until(lambda: server.of("source"))
    server.update(0, 1, "Good morning", "Guten", stable=5, hidden=" Morgen")
    until(lambda: page.row(0, ".translation"))
    page.click("#held")
    page.click("#measure")
    page.click("[data-format=vtt]")
    page.click("#copy")
    page.click("[name=mode][value=type]")
    page.slide("bias", 0.5)
    until(lambda: server.of("config"))
    own = urlsplit(server.url).netloc
    events = [json.loads(one["message"])["message"] for one in page.browser.get_log("performance")]
    asked = [
        event["params"].get("url") or event["params"]["request"]["url"]
        for event in events
        if event["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
    ]
    assert len(asked) > 10
    foreign = [
        url
        for url in asked
        if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != own
    ]
    assert foreign == []
    script = "return performance.getEntriesByType('resource').map((one) => one.name)"
    assert {urlsplit(url).netloc for url in page.run(script)} == {own}
    assert page.complaints() == []


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_it_fits(page: Page, server: FakeServer, width: int) -> None:
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        server.update(0, 0, "W" * 300, "Donaudampfschifffahrtsgesellschaft" * 9)
        until(lambda: page.row(0, ".translation"))
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return document.documentElement.scrollHeight") <= 740
        for mode, name in (("replay", "play"), ("type", "typed")):
            page.click(f"[name=mode][value={mode}]")
            box = f"return document.getElementById('{name}').getBoundingClientRect().bottom"
            assert 0 < page.run(box) <= 740
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
