"""What a session heard and has not translated yet.

0.1 .... waits
0.2 .... takes its place ("coalesced"), and remembers it
0.2 does not fit into the model's context: refused, and 0.1 is translated after all
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from draftsmith.live.engine import Job

MOST_INSTEAD = 64
"""Hypotheses that one which took their place remembers."""


class Stopping:
    """Waits behind everything that was heard: then the session is over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A hypothesis that waits."""

    seg: int
    rev: int
    said: str
    """As it came."""
    text: str
    """Silence stands for the words before it."""
    final: bool
    came: float = field(default_factory=time.monotonic)
    instead: tuple[Heard, ...] = ()
    """Shorter ones whose place it took, the newest first: they may fit where it does not."""

    @property
    def ends(self) -> bool:
        """The segment is over with what there is."""
        return self.final and not self.said.strip()

    def over(self, before: Heard) -> Heard:
        """This one, in the place of one that waited."""
        old = (replace(before, instead=()), *before.instead)
        shorter = [one for one in old if len(one.text) < len(self.text)]
        if len(shorter) > MOST_INSTEAD:
            shorter = shorter[::-1][::2][::-1]  # the shortest stays
        return replace(self, came=before.came, instead=tuple(shorter))

    def next_best(self, shown: str) -> Heard | None:
        """What is translated in place of this, which does not fit; None: nothing.

        `shown` is what was translated last of this segment: there is no need to do it again, except
        to end the segment with it.
        """
        best = replace(self.instead[0], instead=self.instead[1:]) if self.instead else None
        if not self.ends:
            return best
        text = shown if best is None else best.text
        same = not text or text == self.text
        return None if same else replace(self, text=text, instead=self.instead[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A hypothesis on its way through the target."""

    heard: Heard
    source: str
    job: Job
