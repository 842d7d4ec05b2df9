"""The options of `draftsmith tune`; see `options`."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.bench.config import TuneConfig
from draftsmith.commands._options import VerbOptions


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TuneConfig, VerbOptions):
    """Find the best drafter, length or tree for this machine, or that none pays."""
