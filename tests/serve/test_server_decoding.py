"""Which updates are decoded, together with whom, and what becomes of those that cannot be."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.live.translator import InFlightUpdate
from draftsmith.serve.sessions import PendingUpdate, SessionManager
from tests.serve.serving import Client, ConnectionClosed, Served, failing, held, name_of, until

LONG = "the " * 3000
JUST = "the cat sat on "
"""Forty times this has place in the target's context, a hundred times has not."""


@contextlib.contextmanager
def watched(manager: SessionManager) -> Iterator[list[list[InFlightUpdate]]]:
    """The batches that are decoded meanwhile."""
    batches: list[list[InFlightUpdate]] = []
    inner = manager.engine.steps

    def steps(updates: Any, *given: Any) -> Iterator[None]:
        batches.append(list(updates))
        return inner(updates, *given)

    manager.engine.steps = steps
    try:
        yield batches
    finally:
        manager.engine.steps = inner


def busy(served: Served, talk: Client) -> None:
    """Inside `held`: from now on everything waits."""
    talk.source(0, 0, "the")
    until(lambda: not served.manager.scheduler.ready() and talk_heard(served))


@pytest.fixture
def own() -> Iterator[Served]:
    """A server for one test, which counts from 0 or ends it."""
    with Served() as one:
        yield one


@contextlib.contextmanager
def several(served: Served, count: int) -> Iterator[list[Client]]:
    """Sessions that have begun."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(served)) for _ in range(count)]
        for one in clients:
            one.start()
        yield clients


def talk_heard(served: Served) -> bool:
    return any(one.newest is not None for one in served.manager.sessions.values())


def test_sessions_that_wait_go_through_the_target_together(served: Served) -> None:
    with watched(served.manager) as batches, several(served, 4) as clients:
        with held(served.manager):
            busy(served, clients[0])
            for one in clients[1:]:
                one.source(0, 0, "the cat sat")
            until(lambda: len(served.manager.scheduler.ready()) == 3)
        for one in clients:
            one.hear("update")
        assert [len(updates) for updates in batches] == [1, 3]


def test_who_waits_longest_is_served_first(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    monkeypatch.setattr("draftsmith.serve.scheduler.MOST_ROWS", 1)
    with watched(served.manager) as batches, several(served, 3) as clients:
        with held(served.manager):
            busy(served, clients[1])
            for waiting, number in enumerate((2, 0)):
                clients[number].source(0, 0, f"the {'cat ' * number}")
                until(lambda waiting=waiting: len(served.manager.scheduler.ready()) > 0)
                until(lambda number=number: _waits(served, number))
        for number in (2, 0):
            clients[number].hear("update")
        lengths = [len(updates[0].prompt) for updates in batches[1:]]
        assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 2


def _waits(served: Served, number: int) -> bool:
    return list(served.manager.sessions.values())[number].pending_since is not None


@pytest.mark.parametrize("final", [False, True])
def test_only_so_much_may_wait(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client, final: bool
) -> None:
    monkeypatch.setattr("draftsmith.serve.sessions.MOST_PENDING", 3)
    monkeypatch.setattr("draftsmith.serve.sessions.MOST_FINALS", 6)
    most = 6 if final else 3
    with held(served.manager):
        busy(served, talk)
        for seg in range(1, most + 3):
            talk.source(seg, 0, "the cat", final=final)
        refused = [talk.hear("error") for _ in range(2)]
    places = [(one["code"], one["fatal"], one["seg"]) for one in refused]
    assert places == [("busy", False, most + 1), ("busy", False, most + 2)]
    assert [talk.hear("update")["seg"] for _ in range(most + 1)] == list(range(most + 1))
    talk.source(most + 2, 0, "the cat", final=final)  # once more, as it was asked to
    assert talk.hear("update", "error")["seg"] == most + 2


# --------------------------------------------------------------------------- too long


def test_what_waited_is_translated_when_the_newest_does_not_fit(
    served: Served, talk: Client
) -> None:
    with held(served.manager):
        busy(served, talk)
        talk.source(1, 0, "the cat")
        talk.source(1, 1, "the cat sat on")
        talk.source(1, 2, LONG)
        talk.source(1, 3, LONG + LONG, final=True)
        talk.say("ping")
        talk.hear("pong")
    told = [talk.hear("error", "update") for _ in range(4)]
    assert [(one["type"], one["seg"], one["rev"]) for one in told] == [
        ("update", 0, 0), ("error", 1, 3), ("error", 1, 2), ("update", 1, 1),
    ]  # fmt: skip
    assert {one["code"] for one in told[1:3]} == {"source_too_long"}
    talk.say("finish", seg=1)
    final = talk.hear("update", "error")
    assert final["source"] == "the cat sat on" and final["final"]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("ending", ["finish", "silence"])
def test_a_segment_that_grew_too_long_ends_with_what_there_is(
    served: Served, talk: Client, ending: str, waits: bool
) -> None:
    def grow() -> None:
        talk.source(1, 0, "the cat sat")
        if not waits:
            talk.hear("update")
        talk.source(1, 1, LONG)
        if not waits:
            assert talk.hear("update", "error")["code"] == "source_too_long"
        if ending == "finish":
            talk.say("finish", seg=1)
        else:
            talk.source(1, 2, " ", final=True)

    talk.source(0, 0, "the")
    talk.hear("update")
    if waits:
        with held(served.manager):
            talk.source(0, 1, "the log")
            until(lambda: not served.manager.scheduler.ready())
            grow()
            talk.say("ping")
            talk.hear("pong")
    else:
        grow()
    while not (update := talk.hear("update"))["final"]:
        pass
    assert (update["seg"], update["source"]) == (1, "the cat sat")
    talk.source(1, 5, "the cat")
    assert talk.hear("update", "error")["code"] == "segment_closed"
    talk.source(2, 0, "the dog", final=True)
    assert talk.hear("update", "error")["seg"] == 2


def test_of_many_that_wait_the_newest_that_fits_is_found(served: Served, talk: Client) -> None:
    texts = [JUST * count for count in range(30, 150, 2)]
    alone = served.manager.template("cats")
    room = served.manager.target.max_length
    fitting = [one for one in texts if len(alone.encode(one)) < room]
    assert 3 < len(fitting) < len(texts) - 3
    with held(served.manager):
        busy(served, talk)
        for rev, text in enumerate(texts):
            talk.source(1, rev, text)
        talk.say("finish", seg=1)
        talk.say("ping")
        talk.hear("pong")
    while not (update := talk.hear("update"))["final"]:
        pass
    assert update["source"] == fitting[-1]


def test_what_does_not_fit_is_not_its_own_fallback() -> None:
    one = PendingUpdate(seg=0, rev=1, text="", words="the cat", final=True)
    assert one.fallback("the cat") is None and one.fallback("") is None
    assert one.fallback("the") == replace(one, words="the")


def test_a_segment_of_which_nothing_fits_ends_in_silence(talk: Client) -> None:
    talk.source(0, 0, LONG)
    assert talk.hear("error", "update")["code"] == "source_too_long"
    talk.say("finish", seg=0)
    talk.source(1, 0, "the cat", final=True)
    assert talk.hear("update", "error")["seg"] == 1


# --------------------------------------------------------------------------- failures


def test_what_failed_is_tried_again_from_scratch_and_counted(own: Served) -> None:
    with Client(own) as talk:
        talk.start()
        talk.source(0, 0, "the cat sat")
        assert talk.hear("update")["stats"]["tokens"]
        with failing(own.manager, times=1):
            talk.source(0, 1, "the cat sat on")
            assert talk.hear("update", "error")["stats"]["drafted"] == 0
        with failing(own.manager, times=2):
            talk.source(0, 2, "the cat sat on the mat")
            assert talk.hear("update", "error")["code"] == "backend"
        for line in ("live_retried_total 2.0", "live_failed_total 1.0"):
            until(lambda line=line: line in own.get("/metrics")[1])
        talk.say("stop")
        report = talk.hear("bye")["report"]
        assert (report["retried"], report["failed"]) == (2, 1)


def test_an_update_that_was_emitted_is_not_decoded_again_when_counting_fails(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    def add(update: object) -> None:
        raise ValueError("no such counter")

    with monkeypatch.context() as patch:
        patch.setattr(served.manager.metrics, "add", add)
        talk.source(0, 0, "the cat")
        assert talk.hear("update", "error")["rev"] == 0
        talk.source(0, 1, "the cat sat")  # answered behind all that the first one caused
        assert talk.hear("update", "error")["rev"] == 1
    talk.say("stop")
    report = talk.hear("bye")["report"]
    assert (report["retried"], report["failed"]) == (0, 0)


@pytest.mark.parametrize("error", [IndexError("out of range"), KeyError("x"), ValueError()])
def test_a_fault_in_a_model_costs_one_update_and_no_other_session(
    served: Served, talk: Client, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(served) as other:
        other.start()
        with failing(served.manager, times=2, error=error):
            talk.source(0, 0, "the cat", final=True)
            refused = talk.hear("update", "error")
            assert (refused["code"], refused["fatal"]) == ("backend", False)
            assert refused["message"]
        for one in (talk, other):
            one.source(1, 0, "the dog", final=True)
            assert one.hear("update", "error")["final"]
    assert served.get("/healthz")[0] == 200
    traced = [one.exc_info[1] for one in caplog.records if one.exc_info]
    assert traced == [error, error], "who runs the server sees where it came from"


def test_a_text_that_cannot_be_encoded_costs_one_update(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    session = served.manager.find(name_of(served))
    inner = session.translator.begin

    def begin(source: str, *, final: bool) -> InFlightUpdate:
        if "log" in source:
            raise TypeError("not this one")
        return inner(source, final=final)

    monkeypatch.setattr(session.translator, "begin", begin)
    talk.source(0, 0, "the log", final=True)
    assert talk.hear("update", "error")["code"] == "backend"
    talk.source(0, 0, "the dog", final=True)
    assert talk.hear("update", "error")["final"]


def test_when_decoding_has_ended_everyone_is_told(
    monkeypatch: pytest.MonkeyPatch, own: Served
) -> None:
    def turn(**_: Any) -> bool:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(own.manager.scheduler, "turn", turn)
    with Client(own) as talk, Client(own) as new, Client(own) as back:
        name = talk.start()["session"]
        talk.source(0, 0, "the cat")
        while (told := talk.hear())["type"] == "update":
            pass
        assert (told["code"], told["fatal"]) == ("broken", True)
        assert new.start()["code"] == "broken"
        back.say("resume", session=name)
        assert back.hear()["code"] == "broken"
    status, said = own.get("/healthz")
    assert status == 503 and "a fault of ours" in json.loads(said)["error"]
    assert own.get(f"/events?session={name}")[0] == 503


# --------------------------------------------------------------------------- the end


def test_a_server_that_is_told_to_end_answers_what_waits(own: Served) -> None:
    with Client(own) as talk, Client(own) as late:
        talk.start()
        with held(own.manager):
            busy(own, talk)
            for seg in range(1, 5):
                talk.source(seg, 0, "the cat sat", final=True)
            talk.source(5, 0, "the dog")
            talk.say("ping")
            talk.hear("pong")
            own.server.should_exit = True
            until(lambda: own.manager.ending)
            talk.source(6, 0, "the log")
            assert talk.hear("error")["code"] == "stopping"
            assert late.start()["code"] == "stopping"
            with pytest.raises(ConnectionRefusedError), Client(own):
                pass
        got = [talk.hear("update", "bye") for _ in range(7)]
        assert [one["seg"] for one in got[:6]] == list(range(6))
        assert got[6]["type"] == "bye" and got[6]["report"]["updates"] == 6
        with pytest.raises(ConnectionClosed):
            talk.hear()
        assert talk.socket.close_code == 1000


def test_it_ends_in_time_whatever_waits(monkeypatch: pytest.MonkeyPatch, own: Served) -> None:
    for name in ("DRAIN_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(f"draftsmith.serve.app.{name}", 0.2)
    with Client(own) as talk:
        talk.start()
        with held(own.manager):
            busy(own, talk)
            began = time.monotonic()
            own.server.should_exit = True
            assert talk.hear()["type"] == "bye"
            with pytest.raises(ConnectionClosed):
                talk.hear()
            assert time.monotonic() - began < 10
