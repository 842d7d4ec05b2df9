"""Who may talk to the live server, who listens, and what outlives a connection."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from draftsmith.serve.app import AccessPolicy
from draftsmith.serve.protocol import MOST, Outbox
from tests.serve.serving import WAIT, Client, ConnectionClosed, Served, held, name_of, until


def test_a_session_outlives_its_connection(served: Served) -> None:
    with Client(served) as first:
        name = first.start()["session"]
        first.source(0, 0, "the cat sat", final=True)
        said = first.hear("update")
        first.source(1, 0, "the dog")
    with Client(served) as second:
        second.say("resume", session=name)
        assert second.hear()["session"] == name
        state = second.hear("full_state")
        known = [(one["seg"], one["text"], one["final"]) for one in state["segments"]]
        assert known[0] == (0, said["text"], True)
        second.source(1, 0, "the dog")  # once more: nothing happens
        second.source(1, 1, "the dog saw", final=True)
        assert second.hear("update")["final"] or second.hear("update")["final"]
        second.say("stop")
        assert second.hear("bye")["report"]["updates"] >= 2
    assert len(served.manager) == 0


def test_readers_follow_by_events(served: Served, talk: Client) -> None:
    talk.source(0, 0, "the cat sat", final=True)
    said = talk.hear("update")
    url = f"http://127.0.0.1:{served.port}/events?session={name_of(served)}"
    with urllib.request.urlopen(url, timeout=WAIT) as events:
        lines = (line.decode() for line in events if line.startswith(b"data:"))
        state = json.loads(next(lines)[5:])
        assert state["type"] == "full_state" and state["segments"][0]["text"] == said["text"]
        talk.source(1, 0, "the dog")
        assert json.loads(next(lines)[5:]) == talk.hear("update")
        talk.say("stop")
        assert json.loads(next(lines)[5:])["type"] == "bye"
    assert served.get("/events?session=nobody")[0] == 404


def test_who_has_seen_the_newest_is_not_told_again(served: Served, talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    first = talk.hear("update")
    talk.source(0, 1, "the cat sat on", final=True)
    last = talk.hear("update")
    for last_id, kinds in ((last["id"], ["ready", "pong"]), (first["id"], ["ready", "full_state"])):
        with Client(served) as back:
            back.say("resume", session=name_of(served), last_id=last_id)
            back.say("ping")
            assert [back.hear()["type"] for _ in range(2)] == kinds


def test_the_whole_state_is_all_that_updates_said(served: Served, talk: Client) -> None:
    talk.say("config", mask_k=2)
    talk.source(0, 0, "the cat sat")
    said = talk.hear("update")
    with Client(served) as back:
        back.say("resume", session=name_of(served))
        (segment,) = back.hear("full_state")["segments"]
    assert segment == {name: said[name] for name in segment}
    assert {*said} - {*segment} == {"type", "id", "erased", "stats"}


def test_who_says_nothing_for_too_long_is_told_and_let_go() -> None:
    with Served(AccessPolicy(idle_seconds=0.3)) as served, Client(served) as one:
        name = one.start()["session"]
        refused = one.hear()
        assert (refused["code"], refused["fatal"]) == ("idle", True)
        with pytest.raises(ConnectionClosed):
            one.hear()
        assert one.socket.close_code == 1000
        with Client(served) as back:
            back.say("resume", session=name)
            assert back.hear()["type"] == "ready"


def test_sessions_that_nobody_comes_back_to_are_forgotten() -> None:
    with Served(keep_seconds=0.0, sessions=1) as served:
        with Client(served) as one, Client(served) as two:
            assert one.start()["type"] == "ready"
            refused = two.start()
            assert (refused["code"], refused["fatal"]) == ("busy", True)
        until(lambda: not any(one.outboxes for one in served.manager.sessions.values()))
        with Client(served) as three:
            assert three.start()["type"] == "ready"


def test_who_only_looks_on_keeps_no_session_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.serve.app.SWEEP_SECONDS", 0.05)
    with Served(keep_seconds=0.0) as served:
        with Client(served) as one:
            name = one.start()["session"]
            url = f"http://127.0.0.1:{served.port}/events?session={name}"
            events = urllib.request.urlopen(url, timeout=WAIT)
        with events:
            lines = (line.decode() for line in events if line.startswith(b"data:"))
            assert json.loads(next(lines)[5:])["type"] == "full_state"
            assert json.loads(next(lines)[5:])["type"] == "bye"


def test_strangers_stay_outside() -> None:
    access = AccessPolicy(origins=("https://captions.example",), token="open sesame")
    with Served(access) as served:
        good = "?token=open%20sesame"
        for query, headers, code in (
            ("", {}, "token"),
            ("?token=guess", {}, "token"),
            (good, {"Origin": "https://elsewhere.example"}, "origin"),
        ):
            with Client(served, query, **headers) as one:
                assert one.hear("error")["code"] == code
        own = f"http://127.0.0.1:{served.port}"
        for origin in ("https://captions.example", own):
            with Client(served, good, Origin=origin) as one:
                assert one.start()["type"] == "ready"


def test_a_local_server_answers_to_local_names_only() -> None:
    with Served(AccessPolicy(local=True)) as served:
        codes = {}
        hosts = (
            "127.0.0.1",
            "127.0.0.2",
            "localhost",
            "[::1]",
            "elsewhere.example",
            "8.8.8.8",
            "[",
        )
        for host in hosts:
            url = f"http://127.0.0.1:{served.port}/events?session=nobody"
            asked = urllib.request.Request(url, headers={"Host": f"{host}:{served.port}"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=WAIT)
            codes[host] = json.loads(refused.value.read())["code"]
            assert refused.value.code == (403 if codes[host] == "host" else 404)
        assert codes == {
            "127.0.0.1": "unknown_session", "127.0.0.2": "unknown_session",
            "localhost": "unknown_session", "[::1]": "unknown_session",
            "elsewhere.example": "host", "8.8.8.8": "host", "[": "host",
        }  # fmt: skip
        with Client(served, Origin="http://[") as one:
            assert one.hear("error")["code"] == "origin"


def test_health_metrics_and_unknown_pages() -> None:
    with Served() as served, Client(served) as talk:
        talk.start()
        talk.source(0, 0, "the cat sat", final=True)
        talk.hear("update")
        status, text = served.get("/healthz")
        assert status == 200 and json.loads(text)["sessions"] == 1
        until(lambda: "live_finals_total 1.0" in served.get("/metrics")[1])
        assert "live_coalesced_total 0.0" in served.get("/metrics")[1]
        with held(served.manager):
            for rev in range(4):
                talk.source(1, rev, "the " * (rev + 1))
        talk.hear("coalesced")
        assert "live_coalesced_total 0.0" not in served.get("/metrics")[1]
        for name in ("..%2Fapp.py", "nothing.js", "%2e%2e", "x" * 400 + ".js"):
            assert served.get(f"/page/{name}")[0] == 404
        assert served.get("/?name=client.js") == served.get("/")
        assert served.get("/")[1].startswith("<!doctype html>")


def test_a_slow_reader_gets_the_newest_of_each_segment_and_no_more_than_fits() -> None:
    async def read() -> tuple[list[Any], list[Any]]:
        outbox = Outbox()
        outbox.state = lambda: {"type": "full_state"}
        for rev in range(1000):
            outbox.put({"type": "update", "seg": rev % 3, "rev": rev})
        few = [await outbox.next() for _ in range(3)]
        for number in range(MOST + 5):
            outbox.put({"type": "coalesced", "seg": 0, "revs": [number]})
        return few, [await outbox.next() for _ in range(6)]

    few, after = asyncio.run(read())
    assert {one["seg"]: one["rev"] for one in few} == {0: 999, 1: 997, 2: 998}
    assert after[0] == {"type": "full_state"}
    assert [one["revs"] for one in after[1:]] == [[MOST + n] for n in range(5)]


def test_what_takes_the_place_of_an_update_goes_to_the_end_of_the_line() -> None:
    async def read() -> list[Any]:
        outbox = Outbox()
        outbox.put({"type": "update", "seg": 0, "rev": 0})
        outbox.put({"type": "coalesced", "seg": 0, "revs": [1]})
        outbox.put({"type": "update", "seg": 0, "rev": 2})
        return [await outbox.next() for _ in range(2)]

    assert [one["type"] for one in asyncio.run(read())] == ["coalesced", "update"]
