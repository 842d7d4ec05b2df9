"""Detects other programs on this machine, beside which timings are unreliable."""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)

BUSY = 0.75
"""Share of the CPUs that may be busy before a measurement begins."""


def load_of_others() -> str | None:
    """Describe the load in a phrase; None: there is little, or the system does not report it.

    Ask before the work begins: a moment later the load is our own.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load <= max(1.0, BUSY * cpus):
        return None
    return f"other programs use this machine (load {load:.1f} on {cpus} CPUs)"


def warn_if_busy() -> None:
    """Log that speed-ups will be off, where other programs are at work."""
    others = load_of_others()
    if others is not None:
        _log.info("%s: speed-ups measured now will be off; close them and run again", others)
