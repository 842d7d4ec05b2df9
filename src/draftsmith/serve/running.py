"""The process around a hall: it ends when everything that waits has been answered."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from draftsmith.serve.hall import Hall
from draftsmith.serve.messages import MOST_BYTES

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
