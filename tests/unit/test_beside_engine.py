"""Between forwards of the compiled engine torch's operations have one thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.bench.arms import WidthMeter
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.types import DraftTree, TreeShape
from draftsmith.drafters import parallel
from draftsmith.drafters.base import Accepted, Drafter, DraftState
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.hass import Hass
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.parallel import Parallel
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.recycling import Recycling
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native import engine
from draftsmith.targets.native.bindings import compiler
from draftsmith.targets.threads import beside_engine, engine_threads
from draftsmith.targets.toy import tiny_target

COUNT = 3


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(COUNT)
    yield
    torch.set_num_threads(before)


def counts() -> tuple[int, int]:
    """(torch's threads, the engine's)"""
    return torch.get_num_threads(), engine_threads()


def test_torch_has_one_thread_there_and_the_engine_all() -> None:
    with beside_engine(True):
        assert counts() == (1, COUNT)
        with beside_engine(True):
            assert counts() == (1, COUNT)
        assert counts() == (1, COUNT)
    assert counts() == (COUNT, COUNT)
    torch.set_num_threads(2)
    assert counts() == (2, 2), "the engine's number is torch's again"


def test_an_error_gives_the_threads_back() -> None:
    with pytest.raises(KeyError), beside_engine(True):
        raise KeyError
    assert counts() == (COUNT, COUNT)


def test_nothing_changes_without_an_engine() -> None:
    with beside_engine(False):
        assert counts() == (COUNT, COUNT)


def test_other_threads_keep_theirs() -> None:
    found: list[tuple[int, int]] = []

    def other() -> None:
        torch.ones(1 << 20).sum()  # adopts the number of all, if it had none
        found.append(counts())

    with beside_engine(True):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [(COUNT, COUNT)]


class Noting(NoDrafter):
    """Notes how many threads its own work has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int]] = set()

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        self.found.add(counts())
        return super().advance(state, accepted)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("timed", [True, False])
def test_beside_a_compiled_target_torch_has_one_thread(compiles: bool, timed: bool) -> None:
    """Also where the target is wrapped to be timed."""
    model = tiny_target(64, seed=1, hidden=128, dtype=torch.float32).model
    target, drafter = HFTarget(model, compile=compiles, end_ids=frozenset()), Noting()
    drafter.bind(target)
    used = WidthMeter(target) if timed else target
    for _ in decode(used, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=3)):
        assert counts() == (COUNT, COUNT), "the caller's own work is not touched"
    assert drafter.found == {(1 if compiles else COUNT, COUNT)}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("kind", "asking"),
    [(Hass, [engine]), (Parallel, [engine, parallel]), (Recycling, [engine])],
)
def test_the_engine_keeps_its_threads(
    kind: Any, asking: list[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the target and of what it drafts; torch has one while either runs."""
    model = tiny_target(64, seed=1, hidden=128, dtype=torch.float32).model
    target, drafter = HFTarget(model, compile=True, end_ids=frozenset()), kind()
    drafter.bind(target)
    assert target.compiled is not None
    found: dict[ModuleType, set[tuple[int, int]]] = {module: set() for module in asking}

    def noted(module: ModuleType) -> int:
        found[module].add(counts())
        return engine_threads()

    for module in asking:
        monkeypatch.setattr(module, "engine_threads", partial(noted, module))
    shape = TreeShape(widths=(2, 2), keep=4)
    list(decode(target, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=6, shape=shape)))
    assert found == {module: {(1, COUNT)} for module in asking}


def noting(monkeypatch: pytest.MonkeyPatch, cls: type[Drafter]) -> set[int]:
    """How many threads torch has while drafters of this class draft."""
    found: set[int] = set()
    propose = cls.propose

    def noted(*given: Any) -> DraftTree:
        found.add(torch.get_num_threads())
        return propose(*given)

    monkeypatch.setattr(cls, "propose", noted)
    return found


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("compiles", [True, False])
def test_a_draft_has_one_thread_beside_a_compiled_target(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_target(64, seed=1, hidden=128, dtype=torch.float32).model
    target, drafter = HFTarget(model, compile=compiles, end_ids=frozenset()), Hass()
    drafter.bind(target)
    found = noting(monkeypatch, Hass)
    list(decode(target, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=4)))
    assert found == {1 if compiles else COUNT}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_a_draft_model_that_pytorch_runs_keeps_its_threads(
    compiles: bool, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as a part of a cascade."""
    small = tiny_target(64, seed=2, hidden=128, dtype=torch.float32).model
    draft = Independent(Independent.Config(), model=HFTarget(small, compile=compiles))
    drafter = Cascade([PromptLookup(), draft]) if joined else draft
    target = HFTarget(
        tiny_target(64, seed=1, hidden=128, dtype=torch.float32).model,
        compile=True,
        end_ids=frozenset(),
    )
    drafter.bind(target)
    found = noting(monkeypatch, Independent)
    list(decode(target, drafter, [[1, 2, 3]], DecodeOptions(max_new_tokens=4)))
    assert found == {1 if compiles else COUNT}
