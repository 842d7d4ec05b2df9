"""One thread per test process: tiny models gain nothing from more, and barriers cost a lot when
several processes share the cores. Commands that tests start inherit it."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch  # after the environment is set
from tyro._parsers import ParserSpecification

from draftsmith.core.transfer import loaded_frozen
from tests.forks import Forks, start_forks

torch.set_num_threads(1)
# A job in a shell's background ignores interrupts, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-part",
        metavar="K/N",
        help="of the tests that take long only the K-th of N parts (K from 0)",
    )


def left_out(values: Sequence[Mapping[str, int]], n: int) -> list[int]:
    """Which tests are left out: of each n in a row (fewer at the end), all but the one with most
    values of its parameters that no test before has kept, the first of several.

        every(2)    a1 a2 b1 b2 c1 c2    keeps a1 b2 c1: all letters, and both numbers
    """
    kept: set[tuple[str, int]] = set()
    out = []
    for start in range(0, len(values), n):
        some = range(start, min(start + n, len(values)))
        chosen = max(some, key=lambda i: (len(values[i].items() - kept), -i))
        kept |= values[chosen].items()
        out += [i for i in some if i != chosen]
    return out


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.every(n)`: of each n parameters of a test in a row all but one are `full`. Then
    `--full-part`."""
    thinned: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every") and item.get_closest_marker("full") is None:
            thinned.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for these in thinned.values():
        mark = these[0].get_closest_marker("every")
        assert mark is not None
        for item in left_out([item.callspec.indices for item in these], mark.args[0]):
            these[item].add_marker(pytest.mark.full)
    part = config.getoption("--full-part")
    if part is None:
        return
    number, parts = map(int, part.split("/"))
    assert 0 <= number < parts, f"--full-part {part}: the first of {parts} is 0"
    kept, dropped = [], []
    for item in items:
        mine = zlib.crc32(item.nodeid.encode()) % parts == number
        full = item.get_closest_marker("full") is not None
        (dropped if full and not mine else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def loaded() -> Iterator[None]:
    """All that is loaded stays: garbage collection need not walk it again and again, nor need those
    who time something count it."""
    with loaded_frozen():
        yield


@pytest.fixture(scope="module", autouse=True)
def loaded_by_modules() -> None:
    """What the tests of the modules before have imported stays, too. Not at a module's end: its
    last test still holds its fixtures then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def parsers_of_verbs() -> Iterator[None]:
    """tyro makes the parser of a verb from its options at each command line, always the same one:
    most of the time of a short command. Here each is made once."""
    make, made = ParserSpecification.from_callable_or_type, {}

    def once(options: Any, **given: Any) -> ParserSpecification:
        if given["intern_prefix"]:  # a part of another one
            return make(options, **given)
        if options not in made:
            made[options] = make(options, **given)
        return made[options]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParserSpecification, "from_callable_or_type", staticmethod(once))
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Starts processes at once: importing would take most of the time of a short test."""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    with start_forks() as server:
        yield server
