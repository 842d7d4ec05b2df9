"""A stand-in for the live server: it serves the page and says what a test tells it to say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from draftsmith.serve.app import HEADERS, PAGE, TYPES

MODULES = Path(__file__).parent / "modules"
SETTINGS = {
    "target": "German",
    "bias": 0.2,
    "final_bias": None,
    "revision_bias": None,
    "mask_k": 0,
    "mask": "display",
    "no_shrink": True,
    "whole_words": False,
    "context": 0,
}

Message = dict[str, Any]


class FakeServer:
    """One session. Listens from `with` on, on a port of its own."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        """Every message of every client."""
        self.asked: list[str] = []
        """Paths of all requests."""
        self.session, self.model = "session-1", "a model"
        self.settings = dict(SETTINGS)
        self.refuse: list[Message] = []
        """Errors for the next attempts to start or resume, one each."""
        self.closed = False
        """Nobody may connect."""
        self._segments: dict[int, Message] = {}
        self._last_id = 0
        self._sockets: set[ServerConnection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._server = self._do(self._listen())
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------ what tests say

    def update(self, seg: int, rev: int, source: str, text: str, **others: Any) -> None:
        """Tell everyone an update; `others` are more fields of it, or of its stats."""
        self.send(self.an_update(seg, rev, source, text, **others))

    def an_update(self, seg: int, rev: int, source: str, text: str, **others: Any) -> Message:
        self._last_id += 1
        segment = {"seg": seg, "rev": rev, "source": source, "text": text}
        segment |= {"stable": others.pop("stable", 0), "final": others.pop("final", False)}
        segment |= {"hidden": others.pop("hidden", "")}
        segment |= {"degenerate": others.pop("degenerate", False)}
        self._segments[seg] = segment
        stats = {"tokens": 8, "drafted": 6, "accepted": 5, "forwards": 3, "ms": 40.0}
        stats |= {"waited_ms": 1.0, "ne": 0.25, "ad": 0.8, "ao": 0.6} | others
        return {"type": "update", "id": self._last_id, **segment, "erased": 0, "stats": stats}

    def send(self, message: Message) -> None:
        """Tell everyone."""
        self._do(self._broadcast(message))

    def drop(self) -> None:
        """All connections break without a word."""
        self._do(self._break())

    def of(self, kind: str) -> list[Message]:
        """The messages of this type that came."""
        return [one for one in self.received if one["type"] == kind]

    def full_state(self) -> Message:
        return {
            "type": "full_state",
            "session": self.session,
            "id": self._last_id,
            "settings": self.settings,
            "segments": list(self._segments.values()),
            "stats": {"ne": 0.25, "ad": 0.8, "ao": 0.6},
        }

    # ------------------------------------------------------------------ the loop

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> Any:
        return await serve(self._talk, "127.0.0.1", 0, process_request=self._serve_file)

    async def _end(self) -> None:
        await self._break()
        self._server.close()
        await self._server.wait_closed()

    async def _break(self) -> None:
        for socket in list(self._sockets):
            socket.transport.abort()

    async def _broadcast(self, message: Message) -> None:
        for socket in list(self._sockets):
            await socket.send(json.dumps(message))

    async def _talk(self, socket: ServerConnection) -> None:
        try:
            async for frame in socket:
                await self._hear(socket, json.loads(frame))
        except ConnectionClosed:
            pass
        finally:
            self._sockets.discard(socket)

    async def _hear(self, socket: ServerConnection, message: Message) -> None:
        self.received.append(message)
        if message["type"] in ("start", "resume"):
            if self.refuse:
                await socket.send(json.dumps(self.refuse.pop(0)))
                return
            self._sockets.add(socket)
            for said in self._welcome(message):
                await socket.send(json.dumps(said))

    def _welcome(self, message: Message) -> Iterable[Message]:
        yield {
            "type": "ready",
            "v": 1,
            "session": self.session,
            "model": self.model,
            "limits": {"frame_bytes": 65536, "sessions": 32},
            "settings": self.settings,
        }
        if message["type"] == "resume":
            yield self.full_state()

    def _serve_file(self, connection: ServerConnection, request: Request) -> Response | None:
        self.asked.append(request.path)
        url = urlsplit(request.path)
        if url.path == "/ws":
            closed = _response(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"closed")
            return closed if self.closed else None
        if url.path == "/events":
            return self._events(parse_qs(url.query))
        folder = MODULES if url.path.startswith("/modules/") else PAGE
        path = folder / (Path(url.path).name or "index.html")
        if not path.is_file():
            return _response(HTTPStatus.NOT_FOUND, "text/plain", b"not found")
        return _response(HTTPStatus.OK, TYPES[path.suffix], path.read_bytes())

    def _events(self, wanted: dict[str, list[str]]) -> Response:
        """The state of now, and the stream ends: viewers have to come again, and they do."""
        if wanted.get("session") != [self.session]:
            return _response(HTTPStatus.NOT_FOUND, "application/json", b"{}")
        body = f"retry: 100\ndata: {json.dumps(self.full_state())}\n\n"
        return _response(HTTPStatus.OK, "text/event-stream", body.encode())


def _response(status: HTTPStatus, media_type: str, body: bytes) -> Response:
    headers = Headers(
        {
            "Content-Type": f"{media_type}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": HEADERS["Content-Security-Policy"],
            "Connection": "close",
        }
    )
    return Response(status.value, status.phrase, headers, body)
