"""How much of the event loop one address may have: it rests after everything that it asks for.

asked for   a1 a2 a3 a4 (four connections of one address)   b1
done        a1 b1 . . . a2 . . . a3 . . . a4                 . nothing of a, whatever it sends
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

FRAME_SECONDS = 0.001
"""Least time between two frames of an address, in either direction, ..."""
REQUEST_SECONDS = 0.005
"""... and between two requests. What these take before anybody can look at them is part of it."""
REST = 3
"""The rest after a frame, as a multiple of the time that it took."""
_MANY = 1000
"""Addresses before those that have rested are forgotten."""


class Pace:
    """Belongs to one event loop.

    Args:
        used: seconds that this thread has computed; waiting for another thread costs nobody.
    """

    def __init__(self, used: Callable[[], float] = time.thread_time) -> None:
        self._used = used
        self._free: dict[str, float] = {}
        """When an address may go on, by the clock of the event loop."""

    async def turn(self, address: str, seconds: float = FRAME_SECONDS) -> None:
        """Wait until it is this caller's turn among those of its address, which then rests."""
        now = asyncio.get_running_loop().time()
        if len(self._free) > _MANY:
            self._free = {one: free for one, free in self._free.items() if free > now}
        at = max(now, self._free.get(address, now))
        self._free[address] = at + seconds
        await asyncio.sleep(at - now)

    @contextlib.contextmanager
    def charged(self, address: str) -> Iterator[None]:
        """Let the address rest for what is done meanwhile, too."""
        began = self._used()
        try:
            yield
        finally:
            now = asyncio.get_running_loop().time()
            free = max(now, self._free.get(address, now))
            self._free[address] = free + REST * (self._used() - began)
