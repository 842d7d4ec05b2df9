"""The configuration of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftsmith.config import Configuration, at_least, require


@dataclass(frozen=True, kw_only=True)
class SessionLimits(Configuration):
    """How many sessions a server keeps, and for how long."""

    sessions: int = 32
    """Sessions at a time."""
    keep_seconds: float = 60.0
    """How long a session waits for its client to come back."""

    def validate(self) -> None:
        at_least(1, "--sessions", self.sessions)
        good = math.isfinite(self.keep_seconds) and self.keep_seconds >= 0
        require(good, f"--keep-seconds must be 0 or more, got {self.keep_seconds}")
