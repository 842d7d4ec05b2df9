"""What one client can cost the others: neither its words nor its absence stop anybody."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from draftsmith.live.metrics import CHARACTERS, report
from draftsmith.live.records import UpdateRecord
from draftsmith.live.templates import Template
from draftsmith.live.translator import InFlightUpdate, LiveTranslator
from draftsmith.serve.protocol import MOST_BYTES, Outbox, Refused, Settings, Source
from draftsmith.serve.scheduler import ADDRESS_TEXT, FORWARD, INTAKE, Scheduler
from draftsmith.serve.sessions import (
    MOST_STATE,
    MOST_TEXT,
    LiveSession,
    PendingUpdate,
    SessionManager,
)
from tests.forks import Forks
from tests.live_cases import a_target
from tests.serve.command import Running
from tests.serve.serving import Client, Served, a_manager, held, name_of, until

BIG = "the cat sat on " * 2500
"""As long as a frame nearly allows: many times what fits into the context."""


@contextlib.contextmanager
def counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """What the decoding thread does: (forward, rows), (name of a session, characters taken in)."""
    did: list[tuple[str, int]] = []
    forward, take_in = served.manager.target.forward, LiveSession.take_in

    def counting(tokens: Any, *given: Any) -> Any:
        did.append(("forward", len(tokens)))
        return forward(tokens, *given)

    def taking(session: LiveSession) -> Any:
        taken = take_in(session)
        did.append((session.name, taken[0]))
        return taken

    with monkeypatch.context() as patch:
        patch.setattr(served.manager.target, "forward", counting)
        patch.setattr(LiveSession, "take_in", taking)
        yield did


def endless(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """Every output goes on to its limit."""
    monkeypatch.setattr(served.manager.target, "end_ids", frozenset())


def test_a_source_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = a_manager()
    session = LiveSession("one", Settings(), manager._make, lambda _: None)
    session.outboxes[Outbox()] = True
    encoded = counting_encodes(monkeypatch)
    for seg in range(3):
        for rev in range(65):
            session.add(Source(seg=seg, rev=rev, text=BIG + "a" * rev))
    while session.pending_since is not None:
        assert session.take_in()[1] is None
    assert session.counts["failed"] > 3 and sum(encoded) < 1000


def counting_encodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of every text that is encoded from now on."""
    encoded: list[int] = []
    inner = Template._encoded

    def counting(self: Template, rendered: str, outside: Any) -> list[int]:
        encoded.append(len(rendered) + sum(map(len, outside)))
        return inner(self, rendered, outside)

    monkeypatch.setattr(Template, "_encoded", counting)
    return encoded


def test_what_is_remembered_is_bounded_and_the_newest_is_among_it() -> None:
    one = PendingUpdate(seg=0, rev=0, text="", words="the")
    for rev in range(1, 500):
        words = BIG + "a" * rev
        one = PendingUpdate(seg=0, rev=rev, text=words, words=words).replacing(one)
        assert one.characters <= len(words) + MOST_BYTES
    assert "the" in [older.words for older in one.coalesced]
    small = [replace(one, words="a" * n, coalesced=()) for n in range(40)]
    last = small[0]
    for newer in small[1:]:
        last = newer.replacing(last)
    assert len(last.coalesced) == 39, "what is short is kept in full"


def test_a_state_is_bounded_by_characters_and_the_newest_segments_are_in_it() -> None:
    manager = a_manager()
    (session,) = waiting(manager, "here", 1)
    record = UpdateRecord(
        seg=0,
        rev=0,
        source=BIG,
        final=True,
        tokens=0,
        drafted=0,
        accepted=0,
        output=(),
        full=BIG,
        shown=BIG,
    )
    for seg in range(30):
        session._emit_update(replace(record, seg=seg), waited=0.0)
    kept = session.full_state()["segments"]
    assert [one["seg"] for one in kept] == [*range(30 - len(kept), 30)]
    assert MOST_STATE - 2 * len(BIG) < 2 * len(BIG) * len(kept) <= MOST_STATE
    huge = "a" * 2 * MOST_STATE
    session._emit_update(replace(record, seg=30, full=huge, shown=huge), waited=0.0)
    assert [one["seg"] for one in session.full_state()["segments"]] == [30]


def test_what_waits_is_bounded_by_characters() -> None:
    manager = a_manager()
    session = LiveSession("one", Settings(), manager._make, lambda _: None)
    most = MOST_TEXT // len(BIG) + 1
    for seg in range(most):
        session.add(Source(seg=seg, rev=0, text=BIG, final=True))
    with pytest.raises(Refused) as refused:
        session.add(Source(seg=most, rev=0, text="the cat", final=True))
    assert refused.value.code == "busy"


def test_what_was_decoded_remembers_nothing_that_it_replaced(served: Served, talk: Client) -> None:
    with held(served.manager):
        talk.source(0, 0, "the")
        talk.say("ping")
        talk.hear("pong")
        for rev in range(20):
            talk.source(1, rev, "the cat sat" + " on" * rev)
        talk.say("ping")  # all of them have arrived
        talk.hear("pong")
    while talk.hear("update")["seg"] != 1:
        pass
    session = served.manager.find(name_of(served))
    assert [one.coalesced for one in session.to_measure()] == [(), ()]


def test_running_metrics_take_no_time(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    """They come with every update: nothing is drawn, and no text is compared again."""

    def never(*_: Any) -> Any:
        raise AssertionError("this takes long")

    for name in ("bootstrap_ratio", "erasure"):
        monkeypatch.setattr(f"draftsmith.live.metrics.{name}", never)
    for seg in range(3):
        talk.source(seg, 0, "the cat")
        talk.source(seg, 1, "the cat sat on", final=True)
        while not talk.hear("update", "error")["final"]:
            pass
    session = served.manager.find(name_of(served))
    talk.say("ping")
    talk.hear("pong")
    monkeypatch.undo()
    records = list(session._records)
    stats = session.full_state()["stats"]
    whole = report(records, CHARACTERS)
    assert stats["ne"] == pytest.approx(whole.erasure_macro)
    assert (stats["ad"], stats["ao"]) == (whole.accepted_of_drafted, whole.accepted_of_tokens)
    assert whole.erasure_ci95 is not None, "there is something to compute"


def test_earlier_segments_are_encoded_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = a_target(context=512)
    manager = a_manager()
    template = manager.template("cats")
    config = replace(manager._live, context=200)
    translator = LiveTranslator(target, template, config)
    empty = len(template.encode(""))
    for n in range(200):
        source = "the cat sat on the mat " * (1 + n % 3)
        words = len(template.encode(source)) - empty
        translator.finish(
            InFlightUpdate(
                source=source, final=True, prompt=(1,), draft=(), bias=0.0, max_new_tokens=99,
                words=words, tokens=[5, 6, 7], offered=[0], done=True, ended=True,
            )
        )  # fmt: skip
    encoded = counting_encodes(monkeypatch)
    found = translator.begin("the cat", final=False)
    assert len(encoded) < 15 and sum(encoded) < 40_000
    room = 512 - found.max_new_tokens
    for kept in range(1, 200):  # as many as fit, none more
        if len(template.encode("the cat", translator.history[-kept:])) > room:
            break
    assert found.prompt == tuple(template.encode("the cat", translator.history[1 - kept :]))
    assert kept > 4


def test_a_flood_is_taken_in_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    """At most three of 29 segments that fail one by one are looked at before another session."""
    with Client(served) as other, counted(served, monkeypatch) as did:
        flood = name_of(served)
        other.start()
        with held(served.manager):
            talk.source(0, 0, "the")
            until(lambda: did)
            for seg in range(1, 30):
                for rev in range(5):
                    talk.source(seg, rev, "the cat sat on " * (60 + rev))
            other.source(0, 0, "the dog", final=True)
            for one in (talk, other):
                one.say("ping")
                one.hear("pong")
        assert other.hear("update", "error")["final"]
        talk.say("stop")
        talk.hear("bye")
    names = [name for name, _ in did if name != "forward"]
    behind = names[: next(n for n, name in enumerate(names) if name != flood)]
    assert len(behind) <= 3
    text = longest = 0
    for name, characters in did:
        text = 0 if name == "forward" else text + characters
        longest = max(longest, text)
    assert longest <= 2 * MOST_BYTES


def test_a_long_update_stands_back(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    """Another one is decoded in the middle of it, in a few forwards more than alone."""
    endless(monkeypatch, served)
    monkeypatch.setattr("draftsmith.serve.scheduler.SLICE", 1)
    with Client(served) as other, counted(served, monkeypatch) as did:
        other.start()
        talk.source(0, 0, "the cat " * 40, final=True)
        until(lambda: len(did) > 5)
        before = len(did)
        other.source(0, 0, "the dog", final=True)
        update = other.hear("update", "error")
        after, alone = len(did) - before, update["stats"]["forwards"]
        assert len(talk_done(served)) == 1, "the long one goes on"
        assert after <= 2 * alone + 10
        assert talk.hear("update", "error")["stats"]["forwards"] > 3 * alone


def talk_done(served: Served) -> list[LiveSession]:
    """The sessions that have been answered."""
    return [one for one in served.manager.sessions.values() if one.last_id]


def test_who_opens_many_sessions_is_served_no_sooner(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    """Three long updates, and three sessions whose short ones do not end, of one address."""
    monkeypatch.setattr("draftsmith.serve.scheduler.SLICE", 1)
    endless(monkeypatch, served)
    own = served.manager.find(name_of(served))
    own.address = "192.0.2.1"
    with contextlib.ExitStack() as stack:
        did = stack.enter_context(counted(served, monkeypatch))
        many = [stack.enter_context(Client(served)) for _ in range(6)]
        with held(served.manager):
            for number, one in enumerate(many):
                one.start(bias=0.01 * number)  # each has batches of its own
                one.source(0, 0, "the cat " * (20 if number < 3 else 1), final=True)
                for seg in range(1, 1 if number < 3 else 60):
                    one.source(seg, 0, "the cat", final=True)
            talk.source(0, 0, "the dog saw", final=True)
            for one in (*many, talk):
                one.say("ping")
                one.hear("pong")
            before, after = len(did), []
            emit = own.emit
            monkeypatch.setattr(own, "emit", lambda event: after.append(len(did)) or emit(event))
        alone = talk.hear("update")["stats"]["forwards"]
        forwards = sum(name == "forward" for name, _ in did[before : after[0]])
        assert forwards < 2 * alone + 20


def waiting(manager: SessionManager, address: str, number: int, *texts: str) -> list[LiveSession]:
    """Sessions of an address, each with these finals pending."""
    sessions = []
    for _ in range(number):
        name = str(len(manager.scheduler._sessions))
        session = LiveSession(name, Settings(), manager._make, lambda _: None)
        session.address = address
        session.outboxes[Outbox()] = True
        for seg, text in enumerate(texts):
            session.add(Source(seg=seg, rev=0, text=text, final=True))
        manager.scheduler.add(session)
        sessions.append(session)
    return sessions


def turns(
    manager: SessionManager, monkeypatch: pytest.MonkeyPatch, number: int
) -> list[list[LiveSession]]:
    """Whose things each turn took in."""
    taken: list[list[LiveSession]] = []
    take_in = LiveSession.take_in

    def taking(session: LiveSession) -> Any:
        taken[-1].append(session)
        return take_in(session)

    monkeypatch.setattr(LiveSession, "take_in", taking)
    monkeypatch.setattr("draftsmith.serve.scheduler.SLICE", 1)
    for _ in range(number):
        taken.append([])
        manager.scheduler.turn()
    return taken


@pytest.mark.parametrize("words", [1, 20, 500])
def test_many_sessions_of_an_address_take_in_no_more_than_one_may(
    monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    manager, text = a_manager(sessions=64), "the cat " * words
    for address in ("many", "few"):
        waiting(manager, address, 30 if address == "many" else 1, *[text] * 4)
    for taken in turns(manager, monkeypatch, 40):
        mine = [one for one in taken if one.address == "many"]
        assert max(len(text), INTAKE) * (len(mine) - 1) < ADDRESS_TEXT


def test_settings_count_as_something_that_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = a_manager(sessions=64)
    for session in waiting(manager, "many", 60):
        session.configure(Settings(mask_k=2))
    sizes = [*map(len, turns(manager, monkeypatch, 6))]
    assert max(sizes) == ADDRESS_TEXT // INTAKE and sum(sizes) == 60


def test_one_session_of_each_address_comes_before_the_second_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = a_manager(sessions=64)
    waiting(manager, "many", 9, *["the cat"] * 9)
    others = [waiting(manager, name, 1, "the cat")[0] for name in ("one", "two")]
    (first, *_) = turns(manager, monkeypatch, 1)
    assert {one.address for one in first[:3]} == {"many", "one", "two"}
    batches = [batch.sessions for batch in manager.scheduler._running]
    assert others in batches and all(
        len({s.address for s in one}) == 1 or one == others for one in batches
    )


def test_the_oldest_batch_goes_on_for_a_third_of_what_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many rows its forwards have."""
    manager, work = a_manager(sessions=64), {"many": 0, "one": 0}
    monkeypatch.setattr(manager.target, "end_ids", frozenset())
    step = Scheduler._step

    def counting(scheduler: Scheduler, batch: Any) -> None:
        work[batch.sessions[0].address] += batch.next_work
        step(scheduler, batch)

    waiting(manager, "many", ADDRESS_TEXT // INTAKE, "the cat sat on the mat")
    turns(manager, monkeypatch, 30)  # it has had more than the other one needs
    monkeypatch.setattr(Scheduler, "_step", counting)
    (one,) = waiting(manager, "one", 1, "the dog")
    while not one.last_id:
        manager.scheduler.turn()
    rows = FORWARD + ADDRESS_TEXT // INTAKE
    assert work["one"] / 3 - 2 * rows < work["many"] < work["one"] / 3 + 2 * rows


def test_who_opens_one_session_after_the_other_does_not_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = a_manager(sessions=64)
    (old,) = waiting(manager, "here", 1, "the", "the cat", "the cat sat")
    turns(manager, monkeypatch, 300)
    old.add(Source(seg=9, rev=0, text="the dog", final=True))
    waiting(manager, "here", 3, "the")
    assert manager.scheduler.ready()[0] is old


def test_many_small_updates_do_not_stop_a_long_one(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    endless(monkeypatch, served)
    monkeypatch.setattr("draftsmith.serve.scheduler.SLICE", 1)
    with Client(served) as other:
        other.start()
        talk.source(0, 0, "the cat " * 20, final=True)
        for seg in range(40):
            other.source(seg, 0, "the dog", final=True)
        assert talk.hear("update", "error")["final"]
        assert other.hear("update")["seg"] < 39


def test_a_row_that_is_done_may_go_on_while_its_batch_does(
    monkeypatch: pytest.MonkeyPatch, served: Served, talk: Client
) -> None:
    endless(monkeypatch, served)
    monkeypatch.setattr("draftsmith.serve.scheduler.SLICE", 1)
    with Client(served) as other:
        other.start()
        with held(served.manager):
            talk.source(0, 0, "the")
            until(lambda: not served.manager.scheduler.ready())
            talk.source(1, 0, "the cat " * 30, final=True)
            other.source(0, 0, "the dog")
            other.say("ping")
            other.hear("pong")
        for rev in range(1, 4):
            assert other.hear("update")["rev"] == rev - 1
            other.source(0, rev, "the dog" + " saw" * rev)
        assert len(talk_done(served)) == 2
        while talk.hear("update")["seg"] != 1:
            pass


def test_nothing_is_decoded_for_a_client_that_is_away(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    """What it had sent is answered when it comes back; a session that ends drops it."""
    endless(monkeypatch, served)
    with Client(served) as talk:
        name = talk.start()["session"]
        with held(served.manager):
            for seg in range(4):
                talk.source(seg, 0, "the cat " * 20, final=True)
            talk.say("ping")
            talk.hear("pong")
    session = served.manager.sessions[name]
    until(lambda: not session.is_attended)
    with counted(served, monkeypatch) as did:
        time.sleep(0.1)
        assert len(did) < 3, "what had begun may end its forward"
        with Client(served) as back:
            back.say("resume", session=name)
            assert [back.hear("update")["seg"] for _ in range(4)] == [0, 1, 2, 3]
            back.source(4, 0, "the cat " * 20, final=True)
            back.say("stop")
        did.clear()
        until(lambda: not len(served.manager))
        assert len(did) < 40


@pytest.mark.full
def test_a_flood_delays_nobody_and_the_end_comes_in_time(forks: Forks) -> None:
    """20 MB of hypotheses that do not fit and 200 that just do, as one client sends them."""
    waits = []
    with Running(forks) as running, Client(running) as talk, Client(running) as flood:
        for one in (talk, flood):
            assert one.start(context=200)["type"] == "ready"
        for seg in range(200):
            if seg < 8:
                for rev in range(65):
                    flood.source(seg, rev, "The cat sat on the mat. " * 1650 + "a" * rev)
            else:
                flood.source(seg, 0, "The cat sat on the mat. " * 60, final=True)
            if seg % 20 == 0:
                began = time.monotonic()
                talk.source(seg, 0, "The dog sat.", final=True)
                assert talk.hear("update", "error")["final"]
                waits.append(time.monotonic() - began)
        talk.source(999, 0, "The dog sat.", final=True)
        talk.say("ping")
        talk.hear("pong")
        began = time.monotonic()
        code, errors = running.end(signal.SIGTERM)
        seconds = time.monotonic() - began
        got = [talk.hear("update", "bye") for _ in range(2)]
    assert [one["type"] for one in got] == ["update", "bye"] and got[0]["seg"] == 999
    assert code == -signal.SIGTERM and "Traceback" not in errors
    assert seconds < 10 and max(waits) < 3, "on a machine that does other things, too"
