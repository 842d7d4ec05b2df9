"""What the page sends, and how it comes back to a server that it lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.driving import Page, finals, until
from tests.serve.fake_server import FakeServer

# --------------------------------------------------------------------------- input


def test_typing_becomes_hypotheses_and_a_final(page: Page, server: FakeServer) -> None:
    page.type("This is an exam")
    until(lambda: [one["text"] for one in server.of("source")][-1:] == ["This is an exam"])
    page.type("ple. ")
    until(lambda: finals(server.of("source")) == ["This is an example."])
    assert page.run("return document.getElementById('typed').value") == ""
    page.type("Next one\n")
    until(lambda: finals(server.of("source"))[1:] == ["Next one"])
    keys = [(one["seg"], one["rev"]) for one in server.of("source")]
    assert keys == sorted(set(keys))
    assert {seg for seg, _ in keys} == {0, 1}
    assert server.received[0] == {"type": "start", "v": 1}


def test_dials_send_config(page: Page, server: FakeServer) -> None:
    from selenium.webdriver.common.keys import Keys

    assert page.text("#bias-value") == "0.20"
    page.slide("bias", 0.25, 0.3, 0.4)
    assert "67 points" in (page.text("#bias-meaning") or "")
    # on a busy machine the moves before it may have been sent, too
    until(lambda: server.of("config")[-1:] == [{"type": "config", "bias": 0.4}])
    page.slide("mask", 5)
    until(lambda: server.of("config")[-1:] == [{"type": "config", "mask_k": 5}])
    page.slide("bias", 0.5)
    assert "wall" in (page.text("#bias-meaning") or "")
    target = page.browser.find_element("id", "target")
    # `clear` leaves the field, and then the server's answer may fill it again
    target.send_keys(Keys.CONTROL, "a")
    target.send_keys("French\n")
    until(lambda: {"type": "config", "target": "French"} in server.of("config"))
    until(lambda: page.text("#target-head") == "French")


def test_refused_settings_go_back(page: Page, server: FakeServer) -> None:
    page.slide("mask", 7)
    until(lambda: server.of("config"))
    server.send({"type": "error", "code": "bad_settings", "message": "no", "fatal": False})
    until(lambda: page.text("#mask-value") == "0 tokens")


@pytest.mark.full
def test_replay_sends_growing_hypotheses(page: Page, server: FakeServer) -> None:
    page.click("[name=mode][value=replay]")
    assert page.shown("#transcript")
    page.paste("transcript", "One two three four five. Six seven")
    page.slide("lag", 2)
    page.slide("speed", 15)
    page.click("#play")
    until(lambda: len(finals(server.of("source"))) == 2)
    said = [(one["seg"], one["rev"], one["text"]) for one in server.of("source")]
    assert said == [
        (0, 0, "One two"),
        (0, 1, "One two three four"),
        (0, 2, "One two three four five."),
        (1, 0, "Six seven"),
    ]
    until(lambda: page.text("#play") == "Play")


def test_a_first_visit_opens_with_the_sample(page: Page, server: FakeServer) -> None:
    until(lambda: page.run("return document.getElementById('transcript').value"))
    assert page.shown("#transcript") and page.shown("#play") and page.shown("#empty")
    assert server.of("source") == []
    page.click("#play")
    until(lambda: page.row(0, ".source"))
    page.click("#play")
    page.browser.refresh()  # a session goes on: it is somebody's own by now
    until(lambda: page.text("#status") == "live")
    assert page.shown("#typed") and not page.shown("#transcript")


@pytest.mark.full
def test_the_sample_plays_at_a_click(page: Page, server: FakeServer) -> None:
    page.click("#try")
    until(lambda: len(server.of("source")) >= 2)
    first, second = server.of("source")[:2]
    assert second["text"].startswith(first["text"])
    assert page.row(0, ".source")
    page.click("#play")
    until(lambda: finals(server.of("source")))


@pytest.mark.full
def test_changing_the_input_ends_the_segment(page: Page, server: FakeServer) -> None:
    page.type("half a sen")
    until(lambda: server.of("source"))
    page.click("[name=mode][value=replay]")
    until(lambda: finals(server.of("source")) == ["half a sen"])


def test_measuring(page: Page, server: FakeServer) -> None:
    page.click("#measure")
    until(lambda: server.of("measure") == [{"type": "measure"}])
    until(lambda: page.run("return document.getElementById('measure').disabled"))
    server.send({"type": "measured", "updates": 9, "speedup": 1.42, "tps": 71.2, "tps_ar": 50.1})
    until(lambda: page.text("#speedup") == "1.42×")
    assert page.text("#measured") == "71 against 50 tokens/s, 9 updates"
    server.send({"type": "measured", "updates": 0, "speedup": None, "tps": None, "tps_ar": None})
    until(lambda: page.text("#speedup") == "–")


# --------------------------------------------------------------------------- connection


def test_a_lost_connection_is_resumed(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "One.", "Eins.", final=True)
    server.update(1, 0, "Two", "Zwei")
    until(lambda: page.row(1, ".translation") == "Zwei")
    server.an_update(1, 1, "Two and three.", "Zwei und drei.", final=True)  # nobody hears it
    server.an_update(2, 0, "Four", "Vier")
    server.drop()
    until(lambda: page.row(2, ".translation") == "Vier")
    assert page.row(1, ".translation") == "Zwei und drei."
    assert page.row(0, ".translation") == "Eins."
    assert server.of("resume")[-1] == {"type": "resume", "session": "session-1", "last_id": 2}
    until(lambda: page.text("#status") == "live")
    assert not page.shown("#banner")


@pytest.mark.full
def test_while_away_the_text_stays_and_a_banner_says_so(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "One.", "Eins.", final=True)
    until(lambda: page.row(0, ".translation") == "Eins.")
    server.closed = True
    server.drop()
    until(lambda: "trying again" in (page.text("#banner") or ""))
    asked = len(server.asked)
    until(lambda: len(server.asked) >= asked + 2)
    assert page.row(0, ".translation") == "Eins."
    server.closed = False
    until(lambda: page.text("#status") == "live")


@pytest.mark.full
def test_revisions_ascend_across_connections(page: Page, server: FakeServer) -> None:
    page.type("one two")
    until(lambda: server.of("source"))
    server.drop()
    page.type(" three")
    until(lambda: server.of("source")[-1]["text"] == "one two three")
    page.type("\n")
    until(lambda: finals(server.of("source")) == ["one two three"])
    keys = [(one["seg"], one["rev"]) for one in server.of("source")]
    assert keys == sorted(keys) and {seg for seg, _ in keys} == {0}


@pytest.mark.full
def test_a_reload_shows_the_state_and_goes_on(page: Page, server: FakeServer) -> None:
    server.update(0, 0, "One.", "Eins.", final=True)
    until(lambda: page.row(0, ".translation") == "Eins.")
    page.browser.refresh()
    until(lambda: page.row(0, ".translation") == "Eins.")
    assert server.of("resume") == [{"type": "resume", "session": "session-1", "last_id": 0}]
    page.type("Two\n")
    until(lambda: server.of("source"))
    assert server.of("source")[0]["seg"] == 1


@pytest.mark.full
def test_a_session_that_is_gone_begins_anew_and_the_text_stays(
    page: Page, server: FakeServer
) -> None:
    server.update(0, 0, "One.", "Eins.", final=True)
    until(lambda: page.row(0, ".translation") == "Eins.")
    gone = {"type": "error", "code": "unknown_session", "message": "gone", "fatal": True}
    server.refuse.append(gone)
    server.session = "session-2"
    server.drop()
    until(lambda: len(server.of("start")) == 2)
    until(lambda: page.text("#status") == "live")
    assert page.row(0, ".translation") == "Eins."
    assert not page.shown("#banner")


@pytest.mark.full
def test_a_stranger_is_told_why(page: Page, server: FakeServer) -> None:
    error = {"type": "error", "code": "token", "message": "wants its token", "fatal": True}
    server.refuse.append(error)
    server.drop()
    until(lambda: page.text("#status") == "closed")
    assert page.text("#banner") == "wants its token"


def test_the_token_of_the_page_goes_with_every_connection(browser: Any, server: FakeServer) -> None:
    browser.get(f"{server.url}?token=a%26b")
    until(lambda: "/ws?token=a%26b" in server.asked)
