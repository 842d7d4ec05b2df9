"""Frames of all kinds, broken in all places: each is answered, and every connection ends well."""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.serve.serving import Client, ConnectionClosed, Served

CONNECTIONS, FRAMES = 120, 30
TEXTS = (
    *("the", "the cat", "the cat sat", "", "  "),
    *("\u202ethe \U0001f600", "the \ud83d", "the " * 1500),
)
BIG = "@big@"
"""Stands for an integer of 5000 digits, which json.dumps does not write either."""
BROKEN: tuple[Any, ...] = (
    *(0, 1, -1, 1.5, 1e308, float("nan"), float("inf"), 2**53, 2**70, BIG, None, True),
    *("", "\0", "\ud83d", "the cat", "a" * 70_000, [], {}, [[]], {"type": "ping"}),
)
SERVER = {
    *("ready", "warning", "update", "full_state", "coalesced"),
    *("measured", "error", "pong", "bye"),
}


class Fuzzer:
    """Makes frames; knows the sessions that there are.

    Every connection draws from a seed of its own: how far one came before it was over, which is a
    matter of time, has no say in what the others send.
    """

    def __init__(self) -> None:
        self.sessions = ["nobody"]
        self.connect(0)

    def connect(self, number: int) -> None:
        self.rng = random.Random(number)
        self.heard = 0
        self.place = (0, 0)

    def message(self) -> dict[str, Any]:
        """One that makes sense."""
        rng = self.rng
        settings: dict[str, Any] = {
            "bias": rng.choice([0, 0.2, 0.7]),
            "final_bias": rng.choice([None, 0.5]),
            "mask_k": rng.randrange(4),
            "mask": rng.choice(["display", "draft"]),
            "no_shrink": rng.random() < 0.5,
            "context": rng.randrange(3),
            "target": rng.choice(["cats", "dogs", "\u732b"]),
        }
        some = {name: settings[name] for name in rng.sample(sorted(settings), rng.randrange(4))}
        if rng.random() < 0.5:
            return self.source()
        return rng.choice(
            [
                {"type": "start", "v": rng.choice([1, 1, 2]), **some},
                {"type": "config", **some},
                {"type": "finish", "seg": self.place[0]},
                {"type": "resume", "session": rng.choice(self.sessions), "last_id": 1},
                {"type": "measure"},
                {"type": "stop"} if rng.random() < 0.2 else {"type": "measure"},
            ]
        )

    def source(self) -> dict[str, Any]:
        """The next one mostly; else anywhere, or where the last was, often with another text."""
        rng = self.rng
        where = rng.random()
        if where < 0.6:
            self.place = divmod(self.heard, 9)
            self.heard += 1
        elif where < 0.8:
            self.place = rng.randrange(4), rng.randrange(9)
        seg, rev = self.place
        more: dict[str, Any] = rng.choice(
            [{"final": rng.random() < 0.3}, {"t": 1.5, "stability": 0.5}]
        )
        return {"type": "source", "seg": seg, "rev": rev, "text": rng.choice(TEXTS), **more}

    def frame(self, kind: float) -> str | bytes:
        """What is sent: the smaller the kind, between 0 and 1, the more is broken."""
        rng = self.rng
        if kind < 0.05:
            return rng.randbytes(rng.randrange(20))
        if kind < 0.1:
            return "".join(chr(rng.randrange(32, 300)) for _ in range(30))
        if kind < 0.12:
            return "[" * 5000
        message = self.message() if kind < 0.95 else {"type": "ping", "x": 1}
        if kind < 0.6:
            name = rng.choice([*message, *message, "colour", "cleared", "settings"])
            message[name] = rng.choice(BROKEN)
        if kind < 0.2:
            del message[rng.choice(list(message))]
        return json.dumps(message).replace(f'"{BIG}"', "9" * 5000)


class Talk:
    """One connection and what was heard on it."""

    def __init__(self, client: Client, seen: Counter[str]) -> None:
        self.client, self.seen = client, seen
        self.last: dict[str, Any] = {}

    @property
    def is_over(self) -> bool:
        return bool(self.last.get("fatal")) or self.last.get("type") == "bye"

    def hear(self) -> dict[str, Any]:
        self.last = self.client.hear()
        assert self.last["type"] in SERVER
        self.seen[self.last["type"]] += 1
        self.seen[self.last.get("code", "")] += 1
        return self.last

    def send(self, frame: str | bytes, *, text: bool | None = None) -> None:
        try:
            self.client.socket.send(frame, text=text)
        except ConnectionClosed:
            self.listen_on(1000)
            assert self.is_over

    def ping(self) -> None:
        """It is answered, unless the talk is over by then."""
        self.send('{"type": "ping"}')
        while not self.is_over and self.hear()["type"] != "pong":
            pass

    def listen_on(self, *codes: int) -> None:
        """To the end, which has one of these codes, or was announced."""
        with contextlib.suppress(ConnectionClosed):
            while True:  # a server that says nothing and stays is a TimeoutError
                self.hear()
        found = self.client.socket.close_code
        assert found in codes or (found == 1000 and self.is_over)


@pytest.mark.full
def test_every_frame_is_answered_and_every_connection_ends_well() -> None:
    fuzzer, seen = Fuzzer(), Counter[str]()
    with Served(sessions=1000, per_address=1000) as served:
        for number in range(CONNECTIONS):
            pinged = (0.0, 0.1, 0.5, 1.0)[number % 4]
            sense = 0.1 if number % 8 == 4 else 1.0
            fuzzer.connect(number)
            with Client(served) as client:
                talk = Talk(client, seen)
                if number % 5 == 1:
                    client.say("resume", session=fuzzer.rng.choice(fuzzer.sessions))
                elif number % 5:
                    client.say("start")
                    fuzzer.sessions.append(talk.hear()["session"])
                for _ in range(FRAMES):
                    talk.send(fuzzer.frame(sense * fuzzer.rng.random()))
                    if not talk.is_over and fuzzer.rng.random() < pinged:
                        talk.ping()
                    if talk.is_over:
                        break
                if not talk.is_over:
                    talk.ping()
                if talk.is_over:
                    talk.listen_on(1000)
                elif number % 3 == 0:
                    talk.send(b"\xff\xfe", text=True)
                    talk.listen_on(1007)
                elif number % 3 == 1:
                    with contextlib.suppress(ConnectionClosed):  # before all of it is sent
                        client.socket.send("a" * (2 << 20))
                    talk.listen_on(1009, 1006)
        with Client(served) as one:
            assert one.start()["type"] == "ready"
            one.source(0, 0, "the cat sat", final=True)
            assert one.hear("update")["final"]
        assert json.loads(served.get("/healthz")[1])["ok"]
    # a hypothesis is coalesced only where the next one came before it was translated
    assert set(seen) >= (SERVER - {"coalesced"}) | {
        *("not_json", "unknown_type", "bad_field", "bad_text", "bad_settings", "binary"),
        *("too_large", "source_too_long", "stale_rev", "conflict", "segment_closed", "faults"),
        *("no_session", "has_session", "unknown_session", "unknown_segment", "version"),
    }


@pytest.mark.parametrize(
    "frame",
    [
        f'{{"type": "ping", "x": {"1" * 5000}}}',
        f'{{"type": "source", "seg": 0, "rev": {"9" * 4300}, "text": "the cat"}}',
        f'{{"type": "finish", "seg": {2**53}}}',
        f'{{"type": "config", "mask_k": {"1" * 300}}}',
        f'{{"type": "config", "bias": 1{"0" * 400}}}',
    ],
)
def test_numbers_that_nobody_can_count_with_are_refused(served: Served, frame: str) -> None:
    with Client(served) as talk:
        talk.start()
        talk.socket.send(frame)
        assert talk.hear()["code"] == "bad_field"
        talk.say("ping")
        assert talk.hear()["type"] == "pong"
