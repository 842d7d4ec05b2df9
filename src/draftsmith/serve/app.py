"""The HTTP application: WebSocket, event stream, page, health and metrics; and the server process.

GET  /            the page           GET  /page/NAME    its files
WS   /ws          one session        GET  /events       a session, read only (SSE)
GET  /healthz     liveness           GET  /metrics      for Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import uvicorn
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from draftsmith.core.config import bias_warning
from draftsmith.serve import protocol
from draftsmith.serve.pace import REQUEST_SECONDS, Pace
from draftsmith.serve.protocol import MOST_BYTES, VERSION, Message, Outbox, Refused, Resume, Start
from draftsmith.serve.sessions import LiveSession, SessionManager, network

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
"""What starlette raises when the client has disconnected."""
_STATUS = {"host": 403, "origin": 403, "token": 403, "broken": 503}
"""HTTP status of a refusal, by its code; of all others it is 404."""
DRAIN_SECONDS = 2.5
"""Time for pending updates when the server is stopped, ..."""
CLOSE_SECONDS = 0.5
"""... then for connections to send their last messages, ..."""
CANCEL_SECONDS = 1
"""... for uvicorn to close them (what is left is cancelled), and `CLOSE_SECONDS` once more for the
decoding thread. With the 0.2 s in which uvicorn looks for a signal and lets closing begin this is
less than the five seconds that are promised."""
ARRIVAL_SECONDS = 10.0
"""A connection that has not sent a whole request by then, or the next one, is closed."""
PING_SECONDS = 5
"""How often the server asks whether a client is still there; twice as long without an answer, it
is not."""
_POLL_SECONDS = 0.02
_BUSY = (
    "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    "Content-Length: {}\r\n\r\n{}"
)
_PIECE = 4096
"""Bytes of a connection that are taken in before the application has seen their messages."""
_MOST_PARTS = 400
"""Pings, pongs and parts of messages that a connection may send in a second."""
_MOST_FRAMES = 16
"""Frames larger than so many of the largest are not even read: the connection is closed."""


@dataclass(frozen=True, kw_only=True)
class AccessPolicy:
    """Which requests are accepted."""

    host: str = "localhost"
    """The name or address that the server was told to listen at."""
    origins: tuple[str, ...] = ()
    """Other sites whose pages may connect, as browsers send them (a slash at the end is dropped);
    the server's own page always may. The server answers to their names, too."""
    token: str | None = None
    """Required as ?token=...; None: no token is required."""
    idle_seconds: float = 600.0
    """A connection without a message for so long is closed."""

    def check(self, scope: Scope, token: str | None) -> None:
        """Raise Refused for a wrong host, origin or token."""
        self.check_host(scope)
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers["host"]
        own = origin is None or _parts(origin).netloc == host
        if not own and origin not in [one.rstrip("/") for one in self.origins]:
            raise Refused("origin", f"pages of {origin} may not connect", fatal=True)
        given, wanted = (token or "").encode(), (self.token or "").encode()
        if self.token is not None and not secrets.compare_digest(given, wanted):
            raise Refused("token", "this server wants its token: ?token=...", fatal=True)

    def check_host(self, scope: Scope) -> None:
        """Raise Refused unless the request names this server.

        The name of another site may be made to resolve to this machine (DNS rebinding), and the
        page of that site would then be the server's own to a browser. An address cannot.
        """
        hosts = Headers(scope=scope).getlist("host")
        parts = _parts(f"//{hosts[0]}" if len(hosts) == 1 else "")
        name = parts.hostname if [parts.netloc] == hosts else None
        own = [self.host, *(_parts(one).hostname for one in self.origins)]
        own += [scope["server"][0]] if scope.get("server") else []
        known = {_canonical(one) for one in own if one}
        if name is None or not (_is_local(name) or _canonical(name) in known):
            named = ", ".join(hosts)
            sentence = f"this server is not called {named!r} (--allow-origin gives it another name)"
            raise Refused("host", sentence, fatal=True)


def _canonical(name: str) -> str:
    """One spelling of a host name or address."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower()
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_local(name: str) -> bool:
    """Whether a host name can only mean this machine."""
    try:
        return ipaddress.ip_address(_canonical(name)).is_loopback
    except ValueError:
        return name == "localhost"


def _parts(url: str) -> SplitResult:
    """Split a URL into parts, which are empty if it is malformed."""
    try:
        parts = urlsplit(url)
        return urlsplit("") if "@" in parts.netloc or parts.port == 0 else parts
    except ValueError:
        return urlsplit("")


def _network(scope: Scope) -> str:
    """Whose a request is; the empty string where the server cannot know."""
    client = scope.get("client")
    return network(client[0]) if client else ""


class _Door:
    """Lets requests in at the pace of their address, and answers 403 on every path to those that do
    not name this server."""

    def __init__(self, app: ASGIApp, access: AccessPolicy, manager: SessionManager) -> None:
        self.app, self.access, self.manager = app, access, manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self.manager.pace.turn(_network(scope), REQUEST_SECONDS)
        if scope["type"] == "http":  # a WebSocket is told in its own way
            try:
                self.access.check_host(scope)
            except Refused as refused:
                self.manager.metrics.errors.labels(refused.code).inc()
                await JSONResponse(refused.message(), 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def create_app(manager: SessionManager, model: str, access: AccessPolicy) -> FastAPI:
    """Build the application; the decoding thread starts and stops with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        manager.scheduler.start()
        sweeping = asyncio.create_task(_sweep(manager))
        try:
            yield
        finally:
            sweeping.cancel()
            manager.scheduler.stop()
            await asyncio.to_thread(manager.scheduler.join, CLOSE_SECONDS)

    app = FastAPI(title="draftsmith live", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(_Door, access=access, manager=manager)

    files = {path.name: path for path in PAGE.iterdir() if path.suffix in TYPES}

    @app.get("/page/{name}")
    async def page(name: str) -> Response:
        if name not in files:
            return PlainTextResponse("not found", status_code=404)
        path = files[name]
        return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)

    @app.get("/")
    async def index() -> Response:
        return await page("index.html")

    @app.get("/healthz")
    async def health() -> Response:
        broken = manager.scheduler.broken
        alive = broken is None and manager.scheduler.is_alive()
        state = {"ok": alive, "model": model, "sessions": len(manager), "error": broken}
        return JSONResponse(state, status_code=200 if alive else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        manager.metrics.sessions.set(len(manager))
        return Response(manager.metrics.text(), media_type=manager.metrics.media_type)

    @app.get("/events")
    async def events(request: Request, session: str = "", token: str | None = None) -> Response:
        try:
            access.check(request.scope, token)
            live = manager.find(session)
        except Refused as refused:
            return JSONResponse(refused.message(), _STATUS.get(refused.code, 404))
        address = _network(request.scope)
        return EventSourceResponse(
            _mirror(manager, live, address), headers={"Cache-Control": "no-store"}
        )

    @app.websocket("/ws")
    async def websocket(socket: WebSocket, token: str | None = None) -> None:
        await socket.accept()
        try:
            access.check(socket.scope, token)
        except Refused as refused:
            manager.metrics.errors.labels(refused.code).inc()
            await socket.send_text(_wire(refused.message()))
            await socket.close(1008)
            return
        await Connection(socket, manager, model, access.idle_seconds).serve()

    return app


async def _sweep(manager: SessionManager) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        manager.sweep()


async def _mirror(
    manager: SessionManager, live: LiveSession, address: str
) -> AsyncIterator[dict[str, str]]:
    outbox = Outbox()
    manager.subscribe(live, outbox, keeps=False)
    outbox.put_state()
    try:
        while True:
            message, text = await _next(outbox, manager.pace, address)
            yield {"data": text}
            if message["type"] == "bye":
                return
    finally:
        manager.unsubscribe(live, outbox)


async def _next(outbox: Outbox, pace: Pace, address: str) -> tuple[dict[str, Any], str]:
    """Wait for a message and for the turn of its address; return it, and as it is sent."""
    await outbox.some()
    await pace.turn(address)  # newer updates may take the place of those that wait
    with pace.charged(address):
        message = outbox.next()
        return message, _wire(message)


def _wire(message: dict[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, allow_nan=False)


@dataclass(slots=True)
class Connection:
    """One WebSocket; it has a session after `start` or `resume`."""

    socket: WebSocket
    manager: SessionManager
    model: str
    idle_seconds: float
    session: LiveSession | None = None
    outbox: Outbox = field(default_factory=Outbox)
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.address = _network(self.socket.scope)

    async def serve(self) -> None:
        """Serve until either side closes; the session outlives the connection for a while."""
        sending = asyncio.create_task(self._send())
        receiving = asyncio.create_task(self._receive())
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done() and receiving.exception() is None:  # send what is left
                await asyncio.wait((sending,), timeout=1.0)
        finally:
            for task in (sending, receiving):
                task.cancel()
            ends = await asyncio.gather(sending, receiving, return_exceptions=True)
            if self.session is not None:
                self.manager.unsubscribe(self.session, self.outbox)
        for end in ends:  # a client that disconnects is no error
            if isinstance(end, Exception) and not isinstance(end, _GONE):
                raise end
        with contextlib.suppress(*_GONE):
            await self.socket.close()

    async def _send(self) -> None:
        while True:
            message, text = await _next(self.outbox, self.manager.pace, self.address)
            await self.socket.send_text(text)
            if message["type"] == "bye" or (message["type"] == "error" and message["fatal"]):
                return

    async def _receive(self) -> None:
        faults, pace = 0, self.manager.pace
        while True:
            try:
                async with asyncio.timeout(self.idle_seconds):  # wait_for may miss a cancellation
                    frame = await self.socket.receive()
            except TimeoutError:
                self._refuse(Refused("idle", "no message came for too long", fatal=True))
                return
            if frame["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(frame.get("code") or 1000)
            await pace.turn(self.address)
            try:
                with pace.charged(self.address):
                    if frame.get("text") is None:
                        raise Refused("binary", "frames are text: one JSON object each")
                    self._answer(protocol.parse(frame["text"]))
                faults = 0
            except Refused as refused:
                faults += refused.is_fault
                many = f"{faults} frames in a row failed"
                last = faults >= MOST_FAULTS
                answer = Refused("faults", many, fatal=True) if last else refused
                self._refuse(answer)
                if answer.fatal:
                    return

    def _refuse(self, refused: Refused) -> None:
        self.manager.metrics.errors.labels(refused.code).inc()
        self.outbox.put(refused.message())

    def _answer(self, message: Message) -> None:
        """Carry out a message.

        Raises:
            Refused: it is not possible.
        """
        if isinstance(message, Start | Resume):
            self._enter(message)
            return
        if isinstance(message, protocol.Ping):
            self.outbox.put({"type": "pong"})
            return
        live = self.session
        if live is None:
            raise Refused("no_session", "say start (or resume) first")
        match message:
            case protocol.Source():
                self.manager.metrics.coalesced.inc(live.add(message))
                self.manager.metrics.hypotheses.inc()
            case protocol.Finish():
                live.finish(message.seg)
            case protocol.Config():
                live.configure(self.manager.merged(live.wanted, message.settings))
                self._warn(message.settings)
            case protocol.Measure():
                self.manager.measure(live)
            case protocol.Stop():
                live.stop()
        self.manager.scheduler.wake()

    def _enter(self, message: Start | Resume) -> None:
        if self.session is not None:
            raise Refused("has_session", "this connection has a session already")
        if isinstance(message, Resume):
            live = self.manager.find(message.session)
        else:
            live = self.manager.open(message.settings, self.address)
        self.session = live
        self.manager.subscribe(live, self.outbox, keeps=True)
        self.outbox.put(
            {
                "type": "ready",
                "v": VERSION,
                "session": live.name,
                "model": self.model,
                "limits": {
                    "frame_bytes": MOST_BYTES,
                    "sessions": self.manager.limits.sessions,
                    "per_address": self.manager.limits.most_of_one,
                },
                "settings": asdict(live.wanted),
            }
        )
        if isinstance(message, Start):
            self._warn(asdict(live.wanted))
        elif message.last_id != live.last_id:
            self.outbox.put_state()

    def _warn(self, settings: Mapping[str, Any]) -> None:
        """Send a warning about a large bias."""
        warning = bias_warning(*map(settings.get, ("bias", "final_bias", "revision_bias")))
        if warning is not None:
            self.outbox.put({"type": "warning", "message": warning})


def _bounded(manager: SessionManager) -> type[H11Protocol]:
    """Make uvicorn's protocol for a bounded number of connections, which send a request in time."""
    limits = manager.limits
    said = (
        f"at most {limits.connections} connections may be open, {limits.per_address_connections} "
        "of one address\n"
    )

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport = cast(asyncio.Transport, transport)
            super().connection_made(transport)
            clients = [getattr(one, "client", None) for one in self.connections]
            addresses = [network(client[0]) for client in clients if client]
            here = addresses.count(network(self.client[0])) if self.client else 0
            if len(self.connections) > limits.connections or here > limits.per_address_connections:
                manager.metrics.errors.labels("connections").inc()
                transport.write(_BUSY.format(len(said), said).encode())
                transport.close()
            else:
                self.loop.call_later(ARRIVAL_SECONDS, self._expire, self.scope)

        def on_response_complete(self) -> None:
            last = self.scope  # the next request may have come already
            super().on_response_complete()
            self.loop.call_later(ARRIVAL_SECONDS, self._expire, last)

        def _expire(self, last: object) -> None:
            if self.scope is last and not self.transport.is_closing():
                self.transport.close()

    return Bounded


class _PacedFrames(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol with bounds on many small frames.

    One read may bring 256 KiB, which can be 40,000 frames. They are taken in piece by piece, the
    next one when the application has received the messages of the last. Pings, pongs and parts of
    messages never reach the application, so they are counted.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._unread = bytearray()
        self._second, self._parts = 0.0, 0

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._take_in()

    async def receive(self) -> Any:
        message = await super().receive()
        self._take_in()
        return message

    def _take_in(self) -> None:
        while self._unread and not self.read_paused and not self.transport.is_closing():
            piece = bytes(self._unread[:_PIECE])
            del self._unread[:_PIECE]
            super().data_received(piece)

    def handle_cont(self, event: Frame) -> None:
        if self._may_have_one_more():
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self._may_have_one_more():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._may_have_one_more():
            super().handle_pong(event)

    def _may_have_one_more(self) -> bool:
        now = self.loop.time()
        if now - self._second > 1:
            self._second, self._parts = now, 0
        self._parts += 1
        if self._parts > _MOST_PARTS and not self.close_sent:
            self.conn.fail(CloseCode.POLICY_VIOLATION, "too many small frames")
            self.handle_parser_exception()
        return not self.close_sent


class _OneLine(logging.Filter):
    """A text that is not UTF-8 is the client's fault: no place in our code is worth a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError):
            record.exc_info = None
        return True


_one_line = _OneLine()


class Server(uvicorn.Server):
    """Runs the application; at the end it answers what is pending before it closes connections."""

    def __init__(self, app: FastAPI, manager: SessionManager) -> None:
        config = uvicorn.Config(
            app,
            port=0,
            log_level="warning",
            http=_bounded(manager),
            ws=_PacedFrames,
            ws_max_size=_MOST_FRAMES * MOST_BYTES,
            ws_ping_interval=PING_SECONDS,
            ws_ping_timeout=2 * PING_SECONDS,
            ws_per_message_deflate=False,  # a small frame could become a thousand times as large
            proxy_headers=False,  # limits per address cannot rest on what clients say
            timeout_graceful_shutdown=CANCEL_SECONDS,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_one_line)
        self.manager = manager

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, drain pending updates, notify clients, close."""
        for server in self.servers:
            server.close()
        self.manager.end()
        broken = self.manager.scheduler.broken is not None
        await self._until(lambda: broken or not len(self.manager), DRAIN_SECONDS)
        self.manager.dismiss()
        await self._until(lambda: not self.server_state.tasks, CLOSE_SECONDS)
        await super().shutdown(sockets)

    async def _until(self, good: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, at most `seconds`; a second interrupt ends the wait."""
        now = asyncio.get_running_loop().time
        end = now() + seconds
        while not (good() or self.force_exit or now() > end):
            await asyncio.sleep(_POLL_SECONDS)
