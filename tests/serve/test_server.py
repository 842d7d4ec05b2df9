"""The live server over real sockets: what clients are told, whatever they say and whenever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.live_cases import a_stream, a_target

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
client = pytest.importorskip("websockets.sync.client")

import uvicorn  # noqa: E402

from draftsmith.errors import BackendError  # noqa: E402
from draftsmith.live.templates import Template  # noqa: E402
from draftsmith.live.translator import LiveConfig, LiveTranslator  # noqa: E402
from draftsmith.serve.app import MOST_FAULTS, Door, create_app  # noqa: E402
from draftsmith.serve.gauges import Gauges  # noqa: E402
from draftsmith.serve.hall import Hall, HallOptions  # noqa: E402
from draftsmith.serve.messages import Settings  # noqa: E402
from draftsmith.serve.outbox import MOST, Outbox  # noqa: E402

SETTINGS = Settings(
    target="cats", bias=0.2, mask_k=0, mask="display", no_shrink=True, whole_words=False, context=0
)
WAIT = 20.0


class Served:
    """A server in this process, and its hall."""

    def __init__(self, door: Door | None = None, **options: Any) -> None:
        gauges = Gauges()
        self.hall = a_hall(gauges, **options)
        app = create_app(self.hall, gauges, "tiny", door or Door())
        config = uvicorn.Config(app, port=0, log_level="error", ws="websockets-sansio")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Served:
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *reason: object) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT)
        assert not self.thread.is_alive()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


class Client:
    """A connection that speaks in dictionaries."""

    def __init__(self, served: Served, query: str = "", **headers: str) -> None:
        self._opened = client.connect(
            f"ws://127.0.0.1:{served.port}/ws{query}",
            additional_headers=headers,
            max_size=None,
            open_timeout=WAIT,
        )
        self.socket = self._opened.__enter__()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._opened.__exit__(*reason)

    def say(self, kind: str, **values: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **values}))

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next message of these kinds (of any, if none is named)."""
        while True:
            message: dict[str, Any] = json.loads(self.socket.recv(timeout=WAIT))
            if not kinds or message["type"] in kinds:
                return message

    def source(self, seg: int, rev: int, text: str, **more: Any) -> None:
        self.say("source", seg=seg, rev=rev, text=text, **more)

    def start(self, **settings: Any) -> dict[str, Any]:
        self.say("start", **settings)
        return self.hear("ready", "error")


def until(good: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not good():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def a_hall(gauges: Gauges, **options: Any) -> Hall:
    target = a_target()
    settings = options.pop("settings", SETTINGS)

    def template(language: str) -> Template:
        return Template(tokenizer=target.tokenizer, language=language)

    return Hall(target, template, HallOptions(settings=settings, **options), gauges.count)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as one:
        yield one


@pytest.fixture
def talk(served: Served) -> Iterator[Client]:
    with Client(served) as one:
        assert one.start()["type"] == "ready"
        yield one


@contextlib.contextmanager
def held(hall: Hall) -> Iterator[None]:
    """Decoding waits meanwhile."""
    gate, inner = threading.Event(), hall.engine.run_together

    def waiting(*given: Any) -> None:
        gate.wait(WAIT)
        inner(*given)

    hall.engine.run_together = waiting
    try:
        yield
    finally:
        hall.engine.run_together = inner
        gate.set()


# --------------------------------------------------------------------------- translations


def test_updates_are_those_of_a_translator_alone(served: Served, talk: Client) -> None:
    alone = LiveTranslator(served.hall.target, served.hall._template("cats"), LiveConfig(bias=0.2))
    for seg in range(6):
        expected, said = [], []
        for rev, (source, final) in enumerate(a_stream(seed=seg)):
            before = alone.last
            update = alone.update(source, final=final)
            assert update is not None
            talk.source(seg, rev, source, final=final)
            if update is not before:
                expected.append((source, update.record.full, final))
                got = talk.hear("update")
                said.append((got["source"], got["text"] + got["hidden"], got["final"]))
        assert said == expected


def test_ready_and_updates_say_everything(talk: Client, served: Served) -> None:
    talk.source(0, 0, "the cat sat")
    first = talk.hear("update")
    assert (first["id"], first["seg"], first["rev"], first["final"]) == (1, 0, 0, False)
    assert set(first["stats"]) == {
        "tokens", "drafted", "accepted", "forwards", "ms", "waited_ms", "ne", "ad", "ao",
    }  # fmt: skip
    talk.source(0, 1, "the cat sat on the mat", final=True)
    last = talk.hear("update")
    assert last["final"] and last["stable"] == len(last["text"]) and last["hidden"] == ""
    assert last["stats"]["ad"] is not None and last["stats"]["ms"] > 0


def test_what_comes_twice_is_answered_once(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    assert talk.hear("update")["rev"] == 0
    talk.source(0, 0, "the cat sat")
    talk.source(0, 1, "the cat sat")
    talk.source(0, 2, "")
    talk.source(0, 3, "the cat sat on")
    assert talk.hear("update")["rev"] == 3


def test_the_newest_wins_and_no_final_is_lost(served: Served, talk: Client) -> None:
    with held(served.hall):
        talk.source(0, 0, "the")
        talk.say("ping")
        talk.hear("pong")
        until(lambda: served.hall.find(_name(served)).waits_since is None)
        for rev in range(1, 5):
            talk.source(0, rev, " ".join(["cat"] * rev))
        talk.source(0, 5, "the cat sat", final=True)
        for rev in range(3):
            talk.source(1, rev, " ".join(["dog"] * (rev + 1)))
        talk.source(2, 0, "the log", final=True)
        talk.say("ping")
        heard = [talk.hear() for _ in range(7)]
    assert [one["revs"] for one in heard if one["type"] == "coalesced"] == [
        [1], [2], [3], [4], [0], [1],
    ]  # fmt: skip
    got = [talk.hear("update") for _ in range(4)]
    assert [(one["seg"], one["rev"], one["final"]) for one in got] == [
        (0, 0, False), (0, 5, True), (1, 2, False), (2, 0, True),
    ]  # fmt: skip


def _name(served: Served) -> str:
    (name,) = served.hall._seats
    return name


def test_sessions_with_languages_of_their_own_never_mix() -> None:
    """Without a bias every final text is the offline one of its language."""
    settings = replace(SETTINGS, bias=0.0, no_shrink=False)
    streams = {language: a_stream(seed) for seed, language in enumerate(("cats", "dogs", "mice"))}
    with Served(settings=settings) as served, contextlib.ExitStack() as stack:
        clients = {language: stack.enter_context(Client(served)) for language in streams}
        for language, one in clients.items():
            assert one.start(target=language)["settings"]["target"] == language
        for turn in range(max(map(len, streams.values()))):
            for language, stream in streams.items():
                if turn < len(stream):
                    source, final = stream[turn]
                    clients[language].source(0, turn, source, final=final)
        for language, one in clients.items():
            while not (update := one.hear("update"))["final"]:
                pass
            alone = LiveTranslator(
                served.hall.target, served.hall._template(language), LiveConfig(bias=0.0)
            )
            expected = alone.update(streams[language][-1][0], final=True)
            assert expected is not None and update["text"] == expected.text


# --------------------------------------------------------------------------- settings


def test_settings_change_from_the_next_words_on(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    whole = talk.hear("update")
    talk.say("config", mask_k=2)
    masked = talk.hear("update")
    assert masked["rev"] == 0 and masked["id"] == whole["id"] + 1
    assert masked["text"] + masked["hidden"] == whole["text"] and masked["hidden"]
    talk.say("config", target="dogs", bias=0.0)
    talk.source(0, 1, "the cat sat")
    other = talk.hear("update")
    assert other["stats"]["drafted"] == 0 and other["text"] != whole["text"]


# --------------------------------------------------------------------------- connections


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
    assert len(served.hall) == 0


def test_readers_follow_by_events(served: Served, talk: Client) -> None:
    talk.source(0, 0, "the cat sat", final=True)
    said = talk.hear("update")
    url = f"http://127.0.0.1:{served.port}/events?session={_name(served)}"
    with urllib.request.urlopen(url, timeout=WAIT) as events:
        lines = (line.decode() for line in events if line.startswith(b"data:"))
        state = json.loads(next(lines)[5:])
        assert state["type"] == "full_state" and state["segments"][0]["text"] == said["text"]
        talk.source(1, 0, "the dog")
        assert json.loads(next(lines)[5:]) == talk.hear("update")
        talk.say("stop")
        assert json.loads(next(lines)[5:])["type"] == "bye"
    assert served.get("/events?session=nobody")[0] == 404


def test_sessions_that_nobody_comes_back_to_are_forgotten() -> None:
    with Served(keep_seconds=0.0, sessions=1) as served:
        with Client(served) as one, Client(served) as two:
            assert one.start()["type"] == "ready"
            refused = two.start()
            assert (refused["code"], refused["fatal"]) == ("busy", True)
        until(lambda: not any(seat.outboxes for seat in served.hall._seats.values()))
        with Client(served) as three:
            assert three.start()["type"] == "ready"


def test_strangers_stay_outside() -> None:
    door = Door(origins=("https://captions.example",), token="open sesame")
    with Served(door) as served:
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


def test_health_metrics_and_unknown_pages(served: Served, talk: Client) -> None:
    talk.source(0, 0, "the cat sat", final=True)
    talk.hear("update")
    status, text = served.get("/healthz")
    assert status == 200 and json.loads(text)["sessions"] == 1
    until(lambda: "live_finals_total 1.0" in served.get("/metrics")[1])
    for path in ("/page/..%2Fapp.py", "/page/nothing.js", "/page/%2e%2e"):
        assert served.get(path)[0] == 404


# --------------------------------------------------------------------------- bad input


def _long(text: str) -> str:
    return json.dumps({"type": "source", "seg": 0, "rev": 0, "text": text})


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "not_json"),
        ("[1]", "not_json"),
        ("[" * 5000, "not_json"),
        ('{"type": "sing"}', "unknown_type"),
        ('{"type": 7}', "unknown_type"),
        ("{}", "unknown_type"),
        ('{"type": "source", "seg": 0, "rev": 0}', "bad_field"),
        ('{"type": "source", "seg": 0, "rev": 0, "text": "a", "txt": 1}', "bad_field"),
        ('{"type": "source", "seg": "0", "rev": 0, "text": "a"}', "bad_field"),
        ('{"type": "source", "seg": -1, "rev": 0, "text": "a"}', "bad_field"),
        ('{"type": "source", "seg": 0, "rev": 0, "text": "\\ud800"}', "bad_text"),
        ('{"type": "source", "seg": 0, "rev": 0, "text": "\\u0000"}', "bad_text"),
        ('{"type": "config", "bias": 1.5}', "bad_settings"),
        ('{"type": "config", "bias": NaN}', "bad_settings"),
        ('{"type": "config", "bias": "high"}', "bad_field"),
        ('{"type": "config", "mask_k": -1}', "bad_settings"),
        ('{"type": "config", "mask": "some"}', "bad_settings"),
        ('{"type": "config", "target": ""}', "bad_settings"),
        ('{"type": "config", "colour": "red"}', "bad_field"),
        ('{"type": "finish", "seg": 3}', "unknown_segment"),
        ('{"type": "start"}', "has_session"),
        ('{"type": "start", "v": 2}', "version"),
        (_long("a" * 70_000), "too_large"),
        (_long("the " * 3000), "source_too_long"),
        (b"\x00\x01", "binary"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_the_talk_goes_on(
    talk: Client, frame: str | bytes, code: str
) -> None:
    talk.socket.send(frame)
    refused = talk.hear("error")
    assert (refused["code"], refused["fatal"]) == (code, False)
    assert len(refused["message"]) > 10
    talk.source(9, 9, "the cat sat")
    assert talk.hear("update", "error")["type"] == "update"


def test_revisions_are_kept_in_order(talk: Client) -> None:
    talk.source(0, 3, "the cat")
    talk.source(0, 2, "the")
    talk.source(0, 3, "the dog")
    talk.source(1, 0, "the log", final=True)
    talk.source(1, 1, "the log and")
    talk.source(0, 4, "the cat sat")
    codes = [(one := talk.hear("error"))["code"] + str(one["rev"]) for _ in range(4)]
    assert codes == ["stale_rev2", "conflict3", "segment_closed1", "segment_closed4"]


def test_a_segment_without_words_ends_in_silence(talk: Client) -> None:
    talk.source(0, 0, "  ")
    talk.source(0, 1, "", final=True)
    talk.source(1, 0, "the cat")
    talk.say("finish", seg=1)
    got = talk.hear("update")
    final = got if got["final"] else talk.hear("update")
    assert final["seg"] == 1 and final["source"] == "the cat" and final["final"]


def test_before_a_session_there_is_nothing_to_say_to(served: Served) -> None:
    with Client(served) as one:
        one.source(0, 0, "the cat")
        assert one.hear()["code"] == "no_session"
        one.say("resume", session="nobody")
        assert one.hear()["code"] == "unknown_session"


def test_one_fault_after_the_other_ends_the_talk(talk: Client) -> None:
    for _ in range(MOST_FAULTS):
        talk.socket.send("?")
    codes = [talk.hear("error")["code"] for _ in range(MOST_FAULTS)]
    assert codes == ["not_json"] * (MOST_FAULTS - 1) + ["faults"]


def test_any_frames_leave_the_server_standing(served: Served) -> None:
    rng = random.Random(0)
    words = ["type", "source", "start", "config", "seg", "rev", "text", "final", "bias", "stop"]
    values: list[Any] = [0, -1, 1e308, None, True, "", "the cat", "\ud83d", [], {}, [[]], 2**70]
    for _ in range(12):
        with Client(served) as one, contextlib.suppress(Exception):
            if rng.random() < 0.7:
                one.start()
            for _ in range(40):
                if rng.random() < 0.2:
                    one.socket.send(bytes(rng.randrange(256) for _ in range(rng.randrange(20))))
                elif rng.random() < 0.3:
                    one.socket.send("".join(chr(rng.randrange(32, 300)) for _ in range(30)))
                else:
                    frame = {rng.choice(words): rng.choice(values) for _ in range(4)}
                    frame["type"] = rng.choice(["source", "config", "finish", "measure", "ping"])
                    if rng.random() < 0.6:
                        frame |= {"seg": rng.randrange(3), "rev": rng.randrange(9)}
                        frame["text"] = rng.choice(["the", "the cat", "sat on the mat"])
                    one.socket.send(json.dumps(frame))
    with Client(served) as one:
        assert one.start()["type"] == "ready"
        one.source(0, 0, "the cat sat", final=True)
        assert one.hear("update")["final"]
    assert json.loads(served.get("/healthz")[1])["ok"]


# --------------------------------------------------------------------------- a failing target


def test_a_target_that_fails_once_is_asked_again(served: Served, talk: Client) -> None:
    with failing(served.hall, times=1):
        talk.source(0, 0, "the cat sat", final=True)
        assert talk.hear("update", "error")["type"] == "update"


def test_a_target_that_fails_again_costs_that_update_alone(served: Served, talk: Client) -> None:
    talk.source(0, 0, "the cat")
    before = talk.hear("update")
    with failing(served.hall, times=2):
        talk.source(0, 1, "the cat sat")
        refused = talk.hear("update", "error")
        assert (refused["code"], refused["rev"]) == ("backend", 1)
    talk.source(0, 2, "the cat sat on", final=True)
    after = talk.hear("update")
    assert after["final"] and after["stats"]["drafted"] == before["stats"]["tokens"]


@contextlib.contextmanager
def failing(hall: Hall, times: int, error: Exception | None = None) -> Iterator[None]:
    inner, left = hall.target.forward, times

    def forward(*given: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise error or BackendError("no memory")
        return inner(*given)

    hall.target.forward = forward
    try:
        yield
    finally:
        hall.target.forward = inner


# --------------------------------------------------------------------------- measuring, outboxes


def test_the_speed_up_is_measured_on_what_was_said(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    talk.hear("update")
    talk.source(0, 1, "the cat sat on the mat", final=True)
    talk.hear("update")
    talk.say("measure")
    found = talk.hear("measured")
    assert found["updates"] == 2 and found["speedup"] == pytest.approx(
        found["tps"] / found["tps_ar"]
    )


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


# --------------------------------------------------------------------------- found by a review


def test_silence_takes_no_words_away_however_busy_the_server_is(
    served: Served, talk: Client
) -> None:
    with held(served.hall):
        talk.source(0, 0, "the")
        talk.source(1, 0, "the cat sat")
        talk.source(1, 1, "")
        talk.source(1, 2, "", final=True)
    while not (update := talk.hear("update"))["final"]:
        pass
    assert (update["seg"], update["source"]) == (1, "the cat sat")


def test_a_final_is_answered_before_the_session_ends(served: Served, talk: Client) -> None:
    with held(served.hall):
        talk.source(0, 0, "the cat sat", final=True)
        talk.say("stop")
        talk.source(1, 0, "the dog")
        assert talk.hear("error")["code"] == "stopping"
    assert talk.hear("update", "bye")["final"]
    assert talk.hear("bye")["report"]["updates"] == 1
    until(lambda: len(served.hall) == 0)


def test_a_final_that_failed_may_be_said_again(served: Served, talk: Client) -> None:
    with failing(served.hall, times=2):
        talk.source(0, 0, "the cat sat", final=True)
        assert talk.hear("update", "error")["code"] == "backend"
    talk.source(0, 0, "the cat sat", final=True)
    assert talk.hear("update")["final"]


def test_what_was_heard_may_become_final_word_for_word(talk: Client) -> None:
    talk.source(0, 0, "the cat sat")
    talk.source(0, 0, "the cat sat", final=True)
    while not talk.hear("update")["final"]:
        pass
    talk.source(0, 0, "the cat sat", final=True)
    talk.say("ping")
    assert talk.hear()["type"] == "pong"


def test_many_finals_and_many_settings_wait_together(served: Served, talk: Client) -> None:
    with held(served.hall):
        for seg in range(100):
            talk.say("config", mask_k=seg % 5)
            talk.source(seg, 0, "the cat sat", final=True)
        talk.say("ping")
        talk.hear("pong")
    got = [talk.hear("update", "error") for _ in range(100)]
    assert [one["seg"] for one in got] == list(range(100)) and all(one["final"] for one in got)


def test_saying_everything_again_does_no_harm(talk: Client) -> None:
    for seg in range(3):
        talk.source(seg, 0, "the cat sat", final=True)
        talk.hear("update")
    for _ in range(2 * MOST_FAULTS):
        talk.source(0, 0, "the cat sat", final=True)
    codes = {talk.hear("error")["code"] for _ in range(2 * MOST_FAULTS)}
    assert codes == {"segment_closed"}
    talk.source(3, 0, "the dog", final=True)
    assert talk.hear("update")["seg"] == 3


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_a_target_without_memory_costs_one_update_and_no_session(
    served: Served, talk: Client, error: Exception
) -> None:
    with failing(served.hall, times=2, error=error):
        talk.source(0, 0, "the cat sat")
        assert talk.hear("update", "error")["code"] == "backend"
    talk.source(0, 1, "the cat sat on", final=True)
    assert talk.hear("update")["final"]


def test_a_measurement_that_fails_says_so_and_decoding_goes_on(
    served: Served, talk: Client
) -> None:
    talk.source(0, 0, "the cat sat", final=True)
    talk.hear("update")
    with failing(served.hall, times=1):
        talk.say("measure")
        assert talk.hear("measured", "error")["code"] == "measure"
    talk.source(1, 0, "the dog", final=True)
    assert talk.hear("update")["final"]


def test_who_only_looks_on_keeps_no_session_open() -> None:
    with Served(keep_seconds=0.0) as served:
        with Client(served) as one:
            name = one.start()["session"]
            url = f"http://127.0.0.1:{served.port}/events?session={name}"
            events = urllib.request.urlopen(url, timeout=WAIT)
        with events:
            lines = (line.decode() for line in events if line.startswith(b"data:"))
            assert json.loads(next(lines)[5:])["type"] == "full_state"
            assert json.loads(next(lines)[5:])["type"] == "bye"


def test_a_local_server_answers_to_local_names_only() -> None:
    with Served(Door(local=True)) as served:
        codes = {}
        for host in ("127.0.0.1", "localhost", "[::1]", "elsewhere.example", "["):
            url = f"http://127.0.0.1:{served.port}/events?session=nobody"
            asked = urllib.request.Request(url, headers={"Host": f"{host}:{served.port}"})
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=WAIT)
            codes[host] = json.loads(refused.value.read())["code"]
        assert codes == {
            "127.0.0.1": "unknown_session", "localhost": "unknown_session",
            "[::1]": "unknown_session", "elsewhere.example": "host", "[": "host",
        }  # fmt: skip
        with Client(served, Origin="http://[") as one:
            assert one.hear("error")["code"] == "origin"
