"""HTTP around a hall: WebSocket, event stream, page, health and metrics.

GET  /            the page           GET  /page/NAME    its parts
WS   /ws          one session        GET  /events       a session, read only (SSE)
GET  /healthz     is it alive        GET  /metrics      for Prometheus

The files of the page, and the headers they go out with.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.datastructures import Headers

from draftsmith.core.config import bias_warning
from draftsmith.serve.live.protocol import (
    MOST_BYTES,
    VERSION,
    Config,
    Finish,
    Measure,
    Message,
    Outbox,
    Ping,
    Refused,
    Resume,
    Settings,
    Source,
    Start,
    Stop,
    parse,
)
from draftsmith.serve.live.runtime import Gauges
from draftsmith.serve.live.session import Room, spelt
from draftsmith.serve.live.sessions import Hall

PAGE = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".txt": "text/plain"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


MOST_FAULTS = 20
"""Refused frames in a row after which a connection is closed."""
SWEEP_SECONDS = 5.0
_GONE = (WebSocketDisconnect, RuntimeError)
"""What starlette raises for a client that is no longer there."""
_STATUS = {"host": 403, "origin": 403, "token": 403, "broken": 503}
"""Of what is refused over HTTP; what is not here is not found."""


@dataclass(frozen=True, kw_only=True)
class Door:
    """Who may come in."""

    origins: tuple[str, ...] = ()
    """Of other sites' pages; the server's own may always."""
    token: str | None = None
    """Has to be given as ?token=...; None: nobody is asked."""
    local: bool = False
    """Only names of this machine are answered to: a page elsewhere may have its name lead here."""
    idle_seconds: float = 600.0
    """A connection that says nothing for so long is closed."""

    def check(self, headers: Headers, token: str | None) -> None:
        """Raises Refused for a stranger."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if self.local and not _is_local(_parts(f"//{host}").hostname or ""):
            raise Refused("host", f"this server is not called {host}", fatal=True)
        own = origin is None or _parts(origin).netloc == host != ""
        if not own and origin not in self.origins:
            raise Refused("origin", f"pages of {origin} may not connect", fatal=True)
        given, wanted = (token or "").encode(), (self.token or "").encode()
        if self.token is not None and not secrets.compare_digest(given, wanted):
            raise Refused("token", "this server wants its token: ?token=...", fatal=True)


def _is_local(name: str) -> bool:
    """Whether it can only mean this machine."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _parts(url: str) -> SplitResult:
    """Of what cannot be read, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def create_app(hall: Hall, gauges: Gauges, model: str, door: Door) -> FastAPI:
    """The application; decoding begins and ends with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hall.pump.start()
        sweeping = asyncio.create_task(_sweep(hall))
        try:
            yield
        finally:
            sweeping.cancel()
            hall.pump.stop()
            await asyncio.to_thread(hall.pump.join, 30.0)

    app = FastAPI(title="draftsmith live", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/")
    async def index() -> Response:
        return _page("index.html")

    @app.get("/page/{name}")
    async def page(name: str) -> Response:
        return _page(name)

    @app.get("/healthz")
    async def health() -> Response:
        broken = hall.pump.broken
        alive = broken is None and hall.pump.is_alive()
        said = {"ok": alive, "model": model, "sessions": len(hall), "error": broken}
        return JSONResponse(said, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        gauges.sessions.set(len(hall))
        return Response(gauges.text(), media_type=gauges.media_type)

    @app.get("/events")
    async def events(request: Request, session: str = "", token: str | None = None) -> Response:
        try:
            door.check(request.headers, token)
            room = hall.find(session)
        except Refused as refused:
            return JSONResponse(refused.message(), _STATUS.get(refused.code, 404))
        return EventSourceResponse(_mirror(hall, room), headers={"Cache-Control": "no-store"})

    @app.websocket("/ws")
    async def websocket(socket: WebSocket, token: str | None = None) -> None:
        await socket.accept()
        try:
            door.check(socket.headers, token)
        except Refused as refused:
            gauges.errors.labels(refused.code).inc()
            await socket.send_text(_wire(refused.message()))
            await socket.close(1008)
            return
        await Connection(socket, hall, gauges, model, door.idle_seconds).serve()

    return app


async def _sweep(hall: Hall) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        hall.sweep()


async def _mirror(hall: Hall, room: Room) -> AsyncIterator[dict[str, str]]:
    outbox = Outbox()
    hall.join(room, outbox, keeps=False)
    try:
        yield {"data": _wire(room.full_state())}
        while True:
            message = await outbox.next()
            yield {"data": _wire(message)}
            if message["type"] == "bye":
                return
    finally:
        hall.leave(room, outbox)


def _page(name: str) -> Response:
    path = PAGE / name
    if path.parent != PAGE or path.suffix not in TYPES or not path.is_file():
        return PlainTextResponse("not found", status_code=404)
    return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)


def _wire(message: dict[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, allow_nan=False)


class Connection:
    """One WebSocket. It has a room from `start` or `resume` on."""

    def __init__(
        self, socket: WebSocket, hall: Hall, gauges: Gauges, model: str, idle_seconds: float
    ) -> None:
        self.socket, self.hall, self.gauges, self.model = socket, hall, gauges, model
        self.idle_seconds = idle_seconds
        self.room: Room | None = None
        self.outbox = Outbox()

    async def serve(self) -> None:
        """Until either side ends it; the session outlives the connection for a while."""
        sending = asyncio.create_task(self._send())
        listening = asyncio.create_task(self._listen())
        try:
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
            if listening.done() and listening.exception() is None:  # the last words
                await asyncio.wait((sending,), timeout=1.0)
        finally:
            for task in (sending, listening):
                task.cancel()
            ends = await asyncio.gather(sending, listening, return_exceptions=True)
            if self.room is not None:
                self.hall.leave(self.room, self.outbox)
        for end in ends:  # who is gone, in mid-sentence or not, is no error
            if isinstance(end, Exception) and not isinstance(end, _GONE):
                raise end
        with contextlib.suppress(*_GONE):
            await self.socket.close()

    async def _send(self) -> None:
        while True:
            message = await self.outbox.next()
            await self.socket.send_text(_wire(message))
            if message["type"] == "bye" or (message["type"] == "error" and message["fatal"]):
                return

    async def _listen(self) -> None:
        faults = 0
        while True:
            try:
                async with asyncio.timeout(self.idle_seconds):  # wait_for may miss a cancellation
                    frame = await self.socket.receive()
            except TimeoutError:
                self._tell(Refused("idle", "nothing was said for too long", fatal=True))
                return
            if frame["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(frame.get("code") or 1000)
            try:
                if frame.get("text") is None:
                    raise Refused("binary", "frames are text: one JSON object each")
                self._answer(parse(frame["text"]))
                faults = 0
            except Refused as refused:
                faults += refused.is_fault
                many = f"{faults} frames in a row failed"
                last = faults >= MOST_FAULTS
                said = Refused("faults", many, fatal=True) if last else refused
                self._tell(said)
                if said.fatal:
                    return

    def _tell(self, refused: Refused) -> None:
        self.gauges.errors.labels(refused.code).inc()
        self.outbox.put(refused.message())

    def _answer(self, message: Message) -> None:
        """Do what is asked.

        Raises:
            Refused: it cannot be done.
        """
        if isinstance(message, Start | Resume):
            self._enter(message)
            return
        if isinstance(message, Ping):
            self.outbox.put({"type": "pong"})
            return
        room = self.room
        if room is None:
            raise Refused("no_session", "say start (or resume) first")
        match message:
            case Source():
                self.gauges.coalesced.inc(room.hear(message))
                self.gauges.heard.inc()
            case Finish():
                room.finish(message.seg)
            case Config():
                room.configure(self.hall.merged(room.wanted, message.settings, message.cleared))
                self._warn(message.settings)
            case Measure():
                self.hall.measure(room)
            case Stop():
                room.stop()
        self.hall.pump.wake()

    def _enter(self, message: Start | Resume) -> None:
        if self.room is not None:
            raise Refused("has_session", "this connection has a session already")
        if isinstance(message, Resume):
            room = self.hall.find(message.session)
        else:
            room = self.hall.open(message.settings, message.cleared)
        self.room = room
        self.hall.join(room, self.outbox, keeps=True)
        self.outbox.put(
            {
                "type": "ready",
                "v": VERSION,
                "session": room.name,
                "model": self.model,
                "limits": {"frame_bytes": MOST_BYTES, "sessions": self.hall.options.sessions},
                "settings": spelt(room.wanted),
            }
        )
        if isinstance(message, Start):
            self._warn(room.wanted)
        elif message.last_id != room.last_id:
            self.outbox.put(room.full_state())

    def _warn(self, settings: Settings) -> None:
        """What to know before such a bias is used."""
        said = bias_warning(settings.bias, settings.final_bias, settings.revision_bias)
        if said is not None:
            self.outbox.put({"type": "warning", "message": said})


def origins(texts: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them: scheme and host, nothing behind."""
    return tuple(text.rstrip("/") for text in texts)
