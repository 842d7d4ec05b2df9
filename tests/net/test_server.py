"""What clients of `live serve` rely on: messages with their keys, metrics, pages, refusals."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forks import Forks
from tests.net.test_verbs import KNOWN, assert_kept, keep, paths, settled

pytest.importorskip("fastapi")
client = pytest.importorskip("websockets.sync.client")

SECONDS = 30
WORDS = "live serve --target speaker --dtype float64 --bias 0.2 --port 0 --token secret"


@pytest.fixture(scope="module")
def server(old: Path, forks: Forks) -> Iterator[str]:
    """Its address. Interrupted at the end, it ends in order."""
    with forks.command(*WORDS.split(), folder=old) as process:
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, process.communicate(timeout=SECONDS)[1]
        yield found[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 130, errors


class Talk:
    """One connection; everything that is heard is kept."""

    def __init__(self, socket: Any, heard: list[dict[str, Any]]) -> None:
        self.socket, self.heard = socket, heard

    def say(self, kind: str, **values: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **values}))

    def until(self, kind: str) -> dict[str, Any]:
        while True:
            message = json.loads(self.socket.recv(timeout=SECONDS))
            self.heard.append(message)
            if message["type"] == kind:
                return message

    def refused(self) -> str:
        """The code of the next message, which is an error."""
        return str(self.until("error")["code"])


def connected(server: str, query: str = "token=secret", **more: Any) -> Any:
    return client.connect(f"ws://{server}/ws?{query}", open_timeout=SECONDS, **more)


def test_a_session_says_what_it_said(server: str) -> None:
    heard: list[dict[str, Any]] = []
    with connected(server) as first, connected(server) as second:
        converse(Talk(first, heard), Talk(second, heard))
    kinds = {message["type"] for message in heard}
    found = settled([f"{m['type']}: {path}" for m in heard for path in paths(m)])
    wanted = keep("messages", "live serve", found, KNOWN.get("messages", {}).get("live serve"))
    assert_kept("messages of live serve", found, wanted)
    assert kinds == {path.split(":")[0] for path in wanted}


def converse(talk: Talk, other: Talk) -> None:
    talk.say("start", v=1, target="German", bias=0.5)
    ready = talk.until("ready")
    assert ready["settings"]["bias"] == 0.5
    talk.until("warning")
    talk.say("config", bias=0, mask_k=1)
    for rev, text in enumerate(("the cat", "the cat sat", "the cat sat on the mat")):
        talk.say("source", seg=0, rev=rev, text=text, final=rev == 2)
        talk.until("update")
    talk.say("measure")
    talk.until("measured")
    talk.say("ping")
    talk.until("pong")
    other.say("resume", session=ready["session"], last_id=0)
    other.until("full_state")
    # what would go beyond the law's bounds, or makes no sense
    for settings in ({"bias": 2}, {"bias": -0.1}, {"final_bias": 1.5}, {"mask": "all"}):
        other.say("config", **settings)
        assert other.refused() == "bad_settings"
    other.say("sing")
    assert other.refused() == "unknown_type"
    other.socket.send("no json")
    assert other.refused() == "not_json"
    other.say("stop")
    other.until("bye")


def test_strangers_are_refused(server: str) -> None:
    for query, more, code in (
        ("token=wrong", {}, "token"),
        ("", {}, "token"),
        ("token=secret", {"origin": "https://elsewhere.example"}, "origin"),
    ):
        with connected(server, query, **more) as socket:
            assert Talk(socket, []).refused() == code
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, "/events?session=x")
    assert refused.value.code == 403


def get(server: str, path: str) -> Any:
    return urllib.request.urlopen(f"http://{server}{path}", timeout=SECONDS)


def test_metrics_health_and_page_are_there(server: str) -> None:
    text = get(server, "/metrics").read().decode()
    found = sorted(set(re.findall(r"^# TYPE (\S+ \S+)", text, re.MULTILINE)))
    wanted = keep("metrics", "live serve", found, KNOWN.get("metrics", {}).get("live serve"))
    assert_kept("metrics of live serve", found, wanted)
    health = json.loads(get(server, "/healthz").read())
    assert set(health) == {"ok", "model", "sessions", "error"} and health["ok"]
    page = get(server, "/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert b"<html" in page.read()
