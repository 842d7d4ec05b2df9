"""Who may talk to the live server, who listens, and what outlives a connection."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

from draftsmith.serve.app import AccessPolicy, Connection
from draftsmith.serve.protocol import MOST, Outbox, Refused, parse
from draftsmith.serve.sessions import SessionManager, network
from tests.serve.serving import (
    WAIT,
    Client,
    ConnectionClosed,
    Served,
    a_manager,
    held,
    name_of,
    until,
)


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


@contextlib.contextmanager
def asked(served: Served, path: str, *hosts: str) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request with these Host headers."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=WAIT)
    connection.putrequest("GET", path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    with contextlib.closing(connection):
        yield connection.getresponse()


ACCESS = AccessPolicy(
    host="Speaker.example", origins=("https://captions.example", "http://192.0.2.5:8080")
)
OWN = ("127.0.0.1", "127.0.0.2:80", "localhost", "LOCALHOST:8765", "[::1]", "[::1]:8765")
NAMED = ("speaker.example", "SPEAKER.example:8765", "captions.example", "192.0.2.5:8080")
"""The last is an address that is mapped to the server's."""
OTHERS = (
    *("elsewhere.example", "localhost.elsewhere.example", "8.8.8.8", "[::2]", "[", "", "0.0.0.0"),
    *("localhost@elsewhere.example", "elsewhere.example@localhost", "localhost/x", "localhost:x"),
    *("127.1", "xn--localhost", "localhost:99999"),
)


@pytest.fixture(scope="module")
def named() -> Iterator[Served]:
    with Served(ACCESS) as one:
        yield one


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/metrics", "/healthz", "/events", "/x"])
def test_on_every_path_a_server_answers_to_its_own_names_only(named: Served, path: str) -> None:
    """A page whose name resolves to this machine (DNS rebinding) reads nothing."""
    for host in OWN + NAMED:
        with asked(named, path, host) as answer:
            assert answer.status == {"/events": 404, "/x": 404}.get(path, 200), host
    for host in OTHERS:
        with asked(named, path, host) as answer:
            assert (answer.status, json.loads(answer.read())["code"]) == (403, "host"), host


@pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "elsewhere.org")])
def test_a_request_has_one_host(named: Served, hosts: tuple[str, ...]) -> None:
    with asked(named, "/metrics", *hosts) as answer:
        assert answer.status in (400, 403)


def test_a_page_of_another_name_gets_no_session(named: Served) -> None:
    with Client(named, Origin="http://[") as one:
        assert one.hear("error")["code"] == "origin"
    rebound = f"elsewhere.example:{named.port}"
    with socket.create_connection(("127.0.0.1", named.port), timeout=WAIT) as raw:
        raw.sendall(
            f"GET /ws HTTP/1.1\r\nHost: {rebound}\r\nOrigin: http://{rebound}\r\n"
            "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        said = b""
        while b"}" not in said:
            said += raw.recv(1000)
    assert b'"code": "host"' in said and b'"fatal": true' in said


def test_the_address_that_was_reached_is_a_name() -> None:
    """As behind 0.0.0.0, where a server has many; a page of another site cannot be called so."""
    policy = AccessPolicy(host="0.0.0.0")
    scope = {"type": "http", "server": ("::ffff:192.0.2.7", 80), "headers": []}
    for host in ("192.0.2.7", "192.0.2.7:8765", "[::ffff:192.0.2.7]", "0.0.0.0:8765"):
        policy.check_host(scope | {"headers": [(b"host", host.encode())]})
    with pytest.raises(Refused):
        policy.check_host(scope | {"headers": [(b"host", b"192.0.2.8")]})


def test_a_text_that_is_not_utf_8_costs_its_connection_and_one_line(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for frame in (b"\xff\xfe", [b"\xc3", b"("]):
        caplog.clear()
        with Client(served) as one:
            one.start()
            one.socket.send(frame, text=True)
            with pytest.raises(ConnectionClosed):
                one.hear()
            assert one.socket.close_code == 1007
        (record,) = caplog.records
        assert "UTF-8" in record.getMessage() and not record.exc_info


# --------------------------------------------------------------------------- how many


async def _opened(manager: SessionManager, *addresses: str) -> list[str]:
    """What each gets that asks for a session: its address, or the code of a refusal."""
    found = []
    for address in addresses:
        try:
            found.append(manager.open({}, address).address)
        except Refused as refused:
            found.append(refused.code)
    return found


def test_one_address_takes_no_more_than_its_share() -> None:
    with Served(per_address=2) as served, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(served)) for _ in range(3)]
        first, second, third = (one.start() for one in clients)
        assert (first["type"], first["limits"]["per_address"]) == ("ready", 2)
        assert second["type"] == "ready"
        assert third["message"].startswith("2 sessions of one address are open already")


@pytest.mark.parametrize(("sessions", "own"), [(32, 16), (7, 4), (2, 1), (1, 1)])
def test_one_address_has_half_of_the_sessions(sessions: int, own: int) -> None:
    """However few there are: nobody keeps all others out."""
    manager = a_manager(sessions=sessions)
    found = asyncio.run(_opened(manager, *["192.0.2.1"] * sessions, "192.0.2.2"))
    assert found.count("192.0.2.1") == own
    assert found[-1] == ("192.0.2.2" if sessions > 1 else "busy")


def test_what_one_address_may_not_have_others_may() -> None:
    addresses = "192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3"
    found = asyncio.run(_opened(a_manager(per_address=2, sessions=3), *addresses))
    assert found == ["192.0.2.1", "192.0.2.1", "busy", "192.0.2.2", "busy"]


def test_an_address_is_a_machine() -> None:
    assert network("2001:db8::1") == network("2001:db8::ffff:1") != network("2001:db8:0:1::1")
    assert network("::ffff:192.0.2.1") == network("192.0.2.1") != network("192.0.2.2")


@pytest.mark.parametrize("limits", [{"sessions": 3, "per_address": 3}, {"per_address": 3}])
def test_sessions_that_were_left_make_room(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """After a moment in which their clients could come back: the one that was left first."""
    with Served(**limits) as served, Client(served) as stays:
        kept = stays.start()["session"]
        left = []
        for _ in range(2):
            with Client(served) as one:
                left.append(one.start()["session"])
            until(lambda: sum(one.is_left for one in served.manager.sessions.values()) == len(left))
        with Client(served) as new:
            refused = new.start()
            assert (refused["code"], refused["fatal"]) == ("busy", True)
        monkeypatch.setattr("draftsmith.serve.sessions.RELEASE_SECONDS", 0.0)
        with Client(served) as new:
            assert new.start()["type"] == "ready"
            assert {kept, left[1]} < set(served.manager.sessions) and len(served.manager) == 3


def test_connections_are_counted() -> None:
    """What waits for a request holds a place, of its own address alone; others are told at once."""
    with Served(per_address=1) as served, contextlib.ExitStack() as stack:
        most = served.manager.limits.per_address_connections
        address = ("127.0.0.1", served.port)
        waiting = [stack.enter_context(socket.create_connection(address)) for _ in range(most)]
        with socket.create_connection(address, timeout=WAIT) as one:
            told = one.makefile("rb").read()
            assert told.startswith(b"HTTP/1.1 503 ")
            assert told.endswith(b"at most 128 connections may be open, 4 of one address\n")
        with socket.create_connection(address, WAIT, ("127.0.0.2", 0)) as other:
            other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")
        waiting[0].close()
        until(lambda: served.get("/healthz")[0] == 200)


def test_who_sends_no_request_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.serve.app.ARRIVAL_SECONDS", 0.1)
    with Served() as served:
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT) as one:
                one.sendall(begun)
                assert one.recv(100) == b""
        with Client(served) as talk:
            talk.start()
            time.sleep(0.2)
            talk.say("ping")
            assert talk.hear()["type"] == "pong"


def test_who_does_not_end_the_next_request_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.serve.app.ARRIVAL_SECONDS", 0.3)
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    with Served() as served, socket.create_connection(("127.0.0.1", served.port), WAIT) as one:
        one.sendall(request + b"\r\n")
        while b"sessions" not in one.recv(1000):
            pass
        one.sendall(request)
        assert one.recv(100) == b""


def test_frames_are_not_compressed(served: Served) -> None:
    """A read of a few KB could be a thousand times as much text."""
    with Client(served) as one:
        assert not one.socket.protocol.extensions


def test_a_burst_of_frames_lets_others_come_between() -> None:
    async def turns(frames: int) -> int:
        left, seen = frames, 0

        class Socket:
            scope: ClassVar[dict[str, Any]] = {}

            async def receive(self) -> dict[str, str]:
                nonlocal left
                left -= 1
                kind = "receive" if left else "disconnect"
                return {"type": f"websocket.{kind}", "text": '{"type": "ping"}'}

        async def other() -> None:
            nonlocal seen
            while True:
                seen += 1
                await asyncio.sleep(0)

        one: Any = Socket()
        waiting = asyncio.create_task(other())
        with contextlib.suppress(WebSocketDisconnect):
            await Connection(one, a_manager(), "tiny", 60.0)._receive()
        waiting.cancel()
        return seen

    assert asyncio.run(turns(100)) > 80


@pytest.mark.parametrize("frame", [b"\x00\x80", b"\x89\x80"], ids=["parts", "pings"])
def test_who_floods_with_what_is_no_message_is_let_go(served: Served, frame: bytes) -> None:
    """Empty parts of a message and pings never reach the application, which paces the rest."""
    mask = bytes(4)
    with Client(served) as one, Client(served) as other:
        one.socket.socket.sendall(b"\x01\x80" + mask + 1000 * (frame + mask))
        with pytest.raises(ConnectionClosed):
            one.hear()
        assert one.socket.close_code == 1008
        assert other.start()["type"] == "ready"


def test_a_connection_is_read_no_faster_than_it_is_heard(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    taken = WebSocketsSansIOProtocol.send_receive_event_to_app

    def counted(self: WebSocketsSansIOProtocol) -> None:
        taken(self)
        waiting.append(self.queue.qsize())

    monkeypatch.setattr(WebSocketsSansIOProtocol, "send_receive_event_to_app", counted)
    frame = Frame(Opcode.TEXT, b'{"type": "ping"}').serialize(mask=True)
    with Client(served) as one:
        one.socket.socket.sendall(300 * frame)
        for _ in range(300):
            one.hear("pong")
    assert len(waiting) == 300 and max(waiting) <= 1 + 4096 // len(frame)


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
    def read() -> tuple[list[Any], list[Any]]:
        outbox = Outbox()
        outbox.state = lambda: {"type": "full_state"}
        for rev in range(1000):
            outbox.put({"type": "update", "seg": rev % 3, "rev": rev})
        few = [outbox.next() for _ in range(3)]
        for number in range(MOST + 5):
            outbox.put({"type": "coalesced", "seg": 0, "revs": [number]})
        return few, [outbox.next() for _ in range(6)]

    few, after = read()
    assert {one["seg"]: one["rev"] for one in few} == {0: 999, 1: 997, 2: 998}
    assert after[0] == {"type": "full_state"}
    assert [one["revs"] for one in after[1:]] == [[MOST + n] for n in range(5)]


def test_the_state_is_computed_for_who_reads_it() -> None:
    """Not at every 256th message that is not read."""
    asked = []
    outbox = Outbox()
    outbox.state = lambda: {"type": "full_state", "id": asked.append(1)}
    for _ in range(10 * MOST):
        outbox.put({"type": "pong"})
    assert not asked
    assert outbox.next()["type"] == "full_state" and len(asked) == 1


@pytest.mark.parametrize("frame", [{"type": "\ue000" * 20_000}, {"type": "ping", "x" * 60_000: 1}])
def test_a_refusal_repeats_little_of_what_was_sent(frame: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        parse(json.dumps(frame, ensure_ascii=False))
    assert len(refused.value.message()["message"]) <= 1000


def test_what_takes_the_place_of_an_update_goes_to_the_end_of_the_line() -> None:
    def read() -> list[Any]:
        outbox = Outbox()
        outbox.put({"type": "update", "seg": 0, "rev": 0})
        outbox.put({"type": "coalesced", "seg": 0, "revs": [1]})
        outbox.put({"type": "update", "seg": 0, "rev": 2})
        return [outbox.next() for _ in range(2)]

    assert [one["type"] for one in read()] == ["coalesced", "update"]
