"""The process around a hall: it ends when everything that waits has been answered.

What `/metrics` says, by prometheus_client.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from draftsmith.serve.live.protocol import MOST_BYTES
from draftsmith.serve.live.sessions import Hall
from draftsmith.serve.scheduler import Batch

DRAIN_SECONDS = 5.0
"""For what waits when the server is told to end ..."""
CLOSE_SECONDS = 1.0
"""... and then for the connections to hear the last of it."""
_POLL_SECONDS = 0.02
_ROUGHLY_TOO_LARGE = 16
"""Frames that are so much too large are not even read: the connection ends."""


class Server(uvicorn.Server):
    """Runs an application, and ends it gently.

    Args:
        hall: of the application.
        port: where `run` is given no sockets; 0 takes a free one.
    """

    def __init__(self, app: FastAPI, hall: Hall, *, port: int = 0) -> None:
        config = uvicorn.Config(
            app,
            port=port,
            log_level="warning",
            ws="websockets-sansio",
            ws_max_size=_ROUGHLY_TOO_LARGE * MOST_BYTES,
            timeout_graceful_shutdown=int(DRAIN_SECONDS),
        )
        super().__init__(config)
        self.hall = hall

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody new; what waits is answered and everyone is told, unless it takes too long."""
        for server in self.servers:
            server.close()
        self.hall.end()
        broken = self.hall.pump.broken is not None
        await self._until(lambda: broken or not len(self.hall), DRAIN_SECONDS)
        await self._until(lambda: not self.server_state.tasks, CLOSE_SECONDS)
        await super().shutdown(sockets)

    async def _until(self, good: Callable[[], bool], seconds: float) -> None:
        """Or until someone has no patience."""
        end = time.monotonic() + seconds
        while not (good() or self.force_exit or time.monotonic() > end):
            await asyncio.sleep(_POLL_SECONDS)


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0)


class Gauges:
    """Of one server, in a registry of its own."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.sessions = Gauge("live_sessions", "Open sessions", registry=registry)
        self.heard = Counter("live_hypotheses", "Hypotheses taken in", registry=registry)
        self.coalesced = Counter(
            "live_coalesced", "Hypotheses whose place a newer one took", registry=registry
        )
        self.updates = Counter("live_updates", "Updates decoded", registry=registry)
        self.finals = Counter("live_finals", "Final updates decoded", registry=registry)
        self.retried = Counter(
            "live_retried", "Updates decoded once more, from scratch", registry=registry
        )
        self.failed = Counter("live_failed", "Updates that could not be decoded", registry=registry)
        self.tokens = Counter("live_tokens", "Tokens of outputs", registry=registry)
        self.drafted = Counter("live_drafted", "Tokens drafted", registry=registry)
        self.accepted = Counter("live_accepted", "Drafted tokens that stayed", registry=registry)
        self.rows = Histogram(
            "live_batch_rows",
            "Sessions decoded side by side",
            buckets=(1, 2, 4, 8, 16, 32),
            registry=registry,
        )
        self.seconds = Histogram(
            "live_batch_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        self.errors = Counter("live_errors", "Refused frames", ["code"], registry=registry)

    def count(self, batch: Batch) -> None:
        """Add what a batch did."""
        self.rows.observe(batch.rows)
        self.seconds.observe(batch.seconds)
        self.retried.inc(batch.retried)
        self.failed.inc(batch.failed)
        for record in batch.records:
            self.updates.inc()
            self.finals.inc(record.final)
            self.tokens.inc(record.tokens)
            self.drafted.inc(record.drafted)
            self.accepted.inc(record.accepted)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)
