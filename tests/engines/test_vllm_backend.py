"""What we make of what vLLM says, with a package in its place that computes a tabular law."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from draftsmith.core.types import Signals
from draftsmith.distill.trajectories import vllm as vllm_backend
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.distill.trajectories.vllm import VllmBackend
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.toy import TabularTarget
from tests.engines.fake_vllm import Fake, Rows, with_nan

TARGET = TabularTarget(12, end_ids=frozenset({3, 7}), max_length=24)
REQUESTS = tuple(
    CollectRequest(
        prompt_id=f"p{i}",
        prompt=tuple((i * j + 1) % 12 for j in range(1, 3 + i)),
        references=((1, 2, 3, 4), (5, 6, 8, 9, 10, 11) * 5),
        language="de",
    )
    for i in range(5)
)
SETTINGS = CollectSettings(max_new_tokens=9, top_k=4)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Fake:
    package = Fake(TARGET)
    monkeypatch.setitem(sys.modules, "vllm", package)
    return package


def backend() -> VllmBackend:
    return VllmBackend("tiny", dtype="float32")


def assert_same(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    """Equal but for rounding of the laws."""
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert replace(a, top=None, score=0) == replace(b, top=None, score=0)
        assert a.score == pytest.approx(b.score, abs=1e-9)
        assert a.top is not None and b.top is not None
        np.testing.assert_array_equal(a.top.ids_NK, b.top.ids_NK)
        np.testing.assert_allclose(a.top.log_p_NK, b.top.log_p_NK, atol=1e-6)


@pytest.mark.parametrize("forcing", ["greedy", "gold"])
@pytest.mark.parametrize("top_k", [1, 4, 12, None])
def test_both_backends_give_the_same_trajectories(
    forcing: str, top_k: int | None, vllm: Fake
) -> None:
    settings = replace(SETTINGS, forcing=forcing, top_k=top_k)
    ours = TransformersBackend(TARGET).collect(REQUESTS, settings)
    assert_same(backend().collect(REQUESTS, settings), ours)
    assert len({len(one.tokens) for one in ours}) > 1  # ends and limits both cut


def test_samples_have_seeds_of_their_own_and_the_laws_of_temperature_one(vllm: Fake) -> None:
    settings = replace(SETTINGS, forcing="sample", temperatures=(0.5, 0.0), samples=3, top_p=0.9)
    made = backend().collect(REQUESTS, settings)
    assert [one.index for one in made] == [0, 1, 2, 3] * len(REQUESTS)
    assert [one.temperature for one in made[:4]] == [0.5, 0.5, 0.5, 0.0]
    seeds = [params.seed for params in vllm.params]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    # vLLM takes a nucleus at temperature 0 for a contradiction
    assert {(p.temperature, p.top_p) for p in vllm.params} == {(0.5, 0.9), (0.0, 1.0)}
    given = [
        CollectRequest(prompt_id=one.prompt_id, prompt=one.prompt, references=(one.tokens,))
        for one in made
    ]
    judged = TransformersBackend(TARGET).collect(given, replace(SETTINGS, forcing="gold"))
    for one, other in zip(made, judged, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-9)
    # alone, in another order, or with another seed
    vllm.params.clear()
    assert_same(backend().collect(REQUESTS[2:3], settings), made[8:12])
    assert [params.seed for params in vllm.params] == seeds[8:12]
    backend().collect(REQUESTS[2:3], replace(settings, seed=5))
    assert not {params.seed for params in vllm.params[4:]} & set(seeds)


def test_beams_are_cut_at_every_end_judged_and_sorted(vllm: Fake) -> None:
    # vLLM itself ends at 3 only: two beams run over 7, and are the same text up to there
    vllm.beams = [(1, 7, 2, 2), (4, 5, 6, 8), (1, 7, 9, 3), (2, 3)]
    settings = replace(SETTINGS, forcing="beam", beams=4)
    made = backend().collect(REQUESTS[:1], settings)
    assert {one.tokens for one in made} == {(1, 7), (4, 5, 6, 8), (2, 3)}
    assert [one.index for one in made] == [0, 1, 2]
    assert [one.score for one in made] == sorted((one.score for one in made), reverse=True)
    texts = tuple(one.tokens for one in made)
    given = [replace(REQUESTS[0], references=texts)]
    judged = TransformersBackend(TARGET).collect(given, replace(SETTINGS, forcing="gold"))
    assert_same([replace(one, forcing="gold") for one in made], judged)
    one = backend().collect(
        REQUESTS[:1], replace(settings, beams="auto", max_beams=4, mass_gain=1e6)
    )
    assert_same(one, made[:1])


def test_a_search_ends_where_the_context_does(vllm: Fake) -> None:
    vllm.beams = [(1,)]
    long = CollectRequest(prompt_id="long", prompt=(1,) * 18)
    backend().collect([*REQUESTS, long], replace(SETTINGS, forcing="beam", beams=2))
    limits = {params.max_tokens for params in vllm.params if hasattr(params, "beam_width")}
    assert limits == {9, 24 - 18 - 1}


def test_no_more_laws_are_asked_for_at_once_than_memory_is_meant_to_hold(
    vllm: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for forcing in ("greedy", "gold"):
        settings = replace(SETTINGS, forcing=forcing)
        vllm.calls.clear()
        whole = backend().collect(REQUESTS, settings)
        assert len(vllm.calls) == 1
        monkeypatch.setattr(vllm_backend, "CELLS_AT_ONCE", 120)
        vllm.calls.clear()
        assert_same(backend().collect(REQUESTS, settings), whole)
        assert max(vllm.calls) > 1 and len(vllm.calls) > 1
        monkeypatch.setattr(vllm_backend, "CELLS_AT_ONCE", 1)
        vllm.calls.clear()
        assert_same(backend().collect(REQUESTS, settings), whole)
        assert set(vllm.calls) == {1}
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, "vllm", vllm)


@pytest.mark.parametrize(
    ("listing", "word"),
    [
        (lambda rows: [row[1:] for row in rows], "otherwise than 0.32"),  # best only
        (lambda rows: [[*row[1:], row[0]] for row in rows], "otherwise than 0.32"),
        (lambda rows: rows[:-1], "otherwise than 0.32"),
        (with_nan, "NaN"),
    ],
)
def test_laws_that_are_not_as_expected_are_no_laws(
    listing: Callable[[Rows], Rows], word: str, vllm: Fake
) -> None:
    vllm.listing = listing
    with pytest.raises(BackendError, match=word):
        backend().collect(REQUESTS[:1], replace(SETTINGS, forcing="gold"))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (replace(SETTINGS, signals=Signals(layers=(0,))), "hidden states"),
        (replace(SETTINGS, forcing="sample", temperatures=(1.0, 0.005)), "0.005"),
        (replace(SETTINGS, forcing="sample", temperatures=(2.5,)), "2.5"),
        (replace(SETTINGS, forcing="beam", beams=2, length_penalty=0.5), "length_penalty 0"),
        (replace(SETTINGS, forcing="beam", beams=7), "at most 6 beams"),
        (replace(SETTINGS, forcing="beam", beams="auto", max_beams=7), "at most 6 beams"),
        (replace(SETTINGS, top_k=13), "--top-k"),
    ],
)
def test_settings_that_vllm_has_no_means_for_never_reach_it(
    settings: CollectSettings, word: str, vllm: Fake
) -> None:
    with pytest.raises(InputError, match=word):
        backend().collect(REQUESTS, settings)
    assert vllm.calls == []


def test_prompts_that_do_not_fit_never_reach_it(vllm: Fake) -> None:
    def one(length: int, token: int = 1) -> list[CollectRequest]:
        prompt = (token,) * length
        return [CollectRequest(prompt_id="odd", prompt=prompt, references=((1, 2),))]

    gold = replace(SETTINGS, forcing="gold")
    beam = replace(SETTINGS, forcing="beam", beams=2)
    for asked, settings in [
        (one(0), SETTINGS),
        (one(24), SETTINGS),
        (one(2, 12), SETTINGS),
        (one(23), gold),
        (one(23), beam),
    ]:
        with pytest.raises(InputError, match="'odd'"):
            backend().collect([*REQUESTS, *asked], settings)
    assert vllm.calls == []
    assert [len(made.tokens) for made in backend().collect(one(23), SETTINGS)] == [1]
    assert [len(made.tokens) for made in backend().collect(one(22), gold)] == [1]


def test_the_engine_gives_raw_laws_of_any_width(vllm: Fake) -> None:
    engine = {"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2}
    VllmBackend("tiny", dtype="float32", engine=engine)
    assert vllm.options["logprobs_mode"] == "raw_logprobs" and vllm.options["max_logprobs"] == -1
    assert vllm.options["gpu_memory_utilization"] == 0.5
    assert vllm.options["tensor_parallel_size"] == 2
    backend()
    assert "gpu_memory_utilization" not in vllm.options


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_auto_keeps_the_dtype_of_the_weights(stored: str, vllm: Fake, tmp_path: Path) -> None:
    LlamaConfig(dtype=stored).save_pretrained(tmp_path)
    VllmBackend(str(tmp_path))
    assert vllm.options["dtype"] == stored


def test_failures_of_the_engine_are_one_sentence(vllm: Fake) -> None:
    with pytest.raises(BackendError, match=r"load.*'broken'.*weights\.$"):
        VllmBackend("broken", dtype="float32")
    ours = backend()
    vllm.failure = RuntimeError("EngineCore encountered an issue. See above\n  trace")
    with pytest.raises(BackendError, match=r"failed.*'tiny'.*EngineCore"):
        ours.collect(REQUESTS, SETTINGS)


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BackendError, match=r"package vllm.*install"):
        backend()


def test_a_broken_installation_names_the_usual_culprits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "vllm.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(BackendError, match=r"nms does not exist\. .*uninstall"):
        backend()
