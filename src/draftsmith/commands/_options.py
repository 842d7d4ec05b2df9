"""What every verb takes."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import Configuration


@dataclass(frozen=True, kw_only=True)
class VerbOptions(Configuration):
    """What every verb takes."""

    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""
    debug: bool = False
    """Show the full trace of an unexpected error."""
