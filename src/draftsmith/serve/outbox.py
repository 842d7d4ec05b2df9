"""What one connection is still to be sent: a reader who is slow gets the newest state only.

put     update s1 r0   update s1 r1   coalesced   update s1 r2 final
sends   (slow)                        coalesced   update s1 r2 final
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MOST = 256
"""Messages that wait. Of more all but the last are dropped, and the whole state is sent."""


class Outbox:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: OrderedDict[object, dict[str, Any]] = OrderedDict()
        self._count = 0
        self._some = asyncio.Event()
        self.state: Callable[[], dict[str, Any]] | None = None
        """What makes up for messages that were dropped; None: there is no session yet."""

    def put(self, message: dict[str, Any]) -> None:
        """An update takes the place of an earlier one of its segment, at the end of the line."""
        key: object = message["seg"] if message["type"] == "update" else None
        if key is None:
            self._count += 1
            key = (self._count,)
        self._messages.pop(key, None)
        if len(self._messages) >= MOST:
            self._messages.clear()
            if self.state is not None:
                self._messages["state"] = self.state()
        self._messages[key] = message
        self._some.set()

    async def next(self) -> dict[str, Any]:
        """The oldest; waits for one."""
        while not self._messages:
            self._some.clear()
            await self._some.wait()
        _, message = self._messages.popitem(last=False)
        return message
