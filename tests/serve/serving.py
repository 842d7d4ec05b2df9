"""A live server in this process, over real sockets, and clients that speak in dictionaries."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from tests.live_cases import a_target

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
client = pytest.importorskip("websockets.sync.client")

from websockets.exceptions import ConnectionClosed  # noqa: E402, F401

from draftsmith.errors import BackendError  # noqa: E402
from draftsmith.live.config import (  # noqa: E402
    DisplayConfig,
    LiveConfig,
    PromptConfig,
    SessionLimits,
)
from draftsmith.serve.app import AccessPolicy, Server, create_app  # noqa: E402
from draftsmith.serve.sessions import SessionManager  # noqa: E402

LIVE = LiveConfig(bias=0.2, display=DisplayConfig(no_shrink=True))
WAIT = 20.0


class Served:
    """A server in this process, and its sessions."""

    def __init__(self, access: AccessPolicy | None = None, **options: Any) -> None:
        self.manager = a_manager(**options)
        app = create_app(self.manager, "tiny", access or AccessPolicy())
        self.server = Server(app, self.manager)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Served:
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def __exit__(self, *reason: object) -> None:
        self.server.should_exit = True
        self.thread.join(WAIT)
        assert not self.thread.is_alive()

    def end_sessions(self) -> None:
        """Answer what is pending, and end every session."""
        for session in list(self.manager.sessions.values()):
            session.stop()
        self.manager.scheduler.wake()
        until(lambda: not len(self.manager))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url.rstrip("/") + path, timeout=WAIT) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


class HasUrl(Protocol):
    """A server, in this process or in another."""

    @property
    def url(self) -> str: ...


class Client:
    """A connection that speaks in dictionaries."""

    def __init__(self, served: HasUrl, query: str = "", **headers: str) -> None:
        self._opened = client.connect(
            f"ws{served.url.removeprefix('http')}ws{query}",
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


def a_manager(**options: Any) -> SessionManager:
    """Options are those of `SessionLimits`, and `live`."""
    prompt = PromptConfig(language="cats", template="mini")
    live = options.pop("live", LIVE)
    return SessionManager(a_target(), prompt, live, SessionLimits(**options))


@contextlib.contextmanager
def held(manager: SessionManager) -> Iterator[None]:
    """Decoding waits meanwhile."""
    gate, inner = threading.Event(), manager.engine.steps

    def waiting(*given: Any) -> Iterator[None]:
        gate.wait(WAIT)
        return inner(*given)

    manager.engine.steps = waiting
    try:
        yield
    finally:
        manager.engine.steps = inner
        gate.set()


@contextlib.contextmanager
def failing(manager: SessionManager, times: int, error: Exception | None = None) -> Iterator[None]:
    inner, left = manager.target.forward, times

    def forward(*given: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise error or BackendError("no memory")
        return inner(*given)

    manager.target.forward = forward
    try:
        yield
    finally:
        manager.target.forward = inner


def name_of(served: Served) -> str:
    """The name of the only session."""
    (name,) = served.manager.sessions
    return name
