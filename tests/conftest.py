"""One thread per test process: tiny models gain nothing from more, and barriers cost a lot when
several processes share the cores. Commands that tests start inherit it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch  # after the environment is set

from tests.forks import Forks, start_forks

torch.set_num_threads(1)
# A job in a shell's background ignores interrupts, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """All that is imported by now stays: garbage collection need not walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Starts processes at once: importing would take most of the time of a short test."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    with start_forks() as server:
        yield server
