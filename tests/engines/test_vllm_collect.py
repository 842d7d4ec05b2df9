"""A real vLLM engine against transformers: tokens, laws, scores, beams.

Runs where DRAFTSMITH_VLLM_PYTHON names the python of an environment with vLLM (`make_env.sh`).
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftsmith
from draftsmith.core.rows import until_end
from draftsmith.core.types import Signals
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from tests.tiny_models import tiny_tokenizer

PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PYTHON is None, reason="DRAFTSMITH_VLLM_PYTHON names no python with vLLM"),
]

CONTEXT = 96
ENDS = frozenset({0, *range(10, 120, 10)})
"""The tokenizer's end, which vLLM's beam search knows, and eleven that it does not."""
CLOSE = 1e-4
"""Nats between float32 of two implementations (found: up to 2.2e-5)."""
NEAR_TIE = 1e-3


def requests(count: int = 6) -> tuple[CollectRequest, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        CollectRequest(
            prompt_id=f"p{i}",
            prompt=tuple(rng.integers(300, size=length).tolist()),
            references=(
                tuple(rng.integers(120, 300, size=9).tolist()),
                (*rng.integers(120, 300, size=4).tolist(), 20, 5, 6),
                tuple(rng.integers(120, 300, size=200).tolist()),
            ),
            language="en",
            tag=f"t{i % 2}",
        )
        for i, length in enumerate([1, 3, 7, 12, 30, CONTEXT - 5][:count])
    )


GREEDY = CollectSettings(forcing="greedy", max_new_tokens=24, top_k=50)
SAMPLE = CollectSettings(
    forcing="sample", max_new_tokens=12, top_k=20, samples=2, temperatures=(0.0, 0.7, 1.3), seed=1
)
BEAM = CollectSettings(forcing="beam", max_new_tokens=10, top_k=20, beams=4)
GOLD = CollectSettings(forcing="gold", max_new_tokens=40, top_k=50)
JOBS: dict[str, tuple[tuple[CollectRequest, ...], CollectSettings]] = {
    "greedy": (requests(), GREEDY),
    "whole laws": (requests(2), replace(GREEDY, top_k=None, max_new_tokens=4)),
    "samples": (requests(), SAMPLE),
    "samples again, others with them": (requests()[::-1], SAMPLE),
    "samples of another seed": (requests(), replace(SAMPLE, seed=2)),
    "nucleus": (requests(), replace(SAMPLE, temperatures=(1.0,), top_p=0.3)),
    "many draws": (
        requests(3)[2:],
        replace(SAMPLE, temperatures=(0.6,), samples=600, max_new_tokens=1, top_k=1),
    ),
    "beams": (requests(), BEAM),
    "beams auto": (requests(), replace(BEAM, beams="auto", max_beams=4, mass_gain=0.3)),
    "gold": (requests(), GOLD),
    "refused: signals": (requests(), replace(GREEDY, signals=Signals(last_hidden=True))),
    "refused: temperature": (requests(), replace(SAMPLE, temperatures=(0.001,))),
    "refused: length penalty": (requests(), replace(BEAM, length_penalty=1.0)),
    "refused: beams": (requests(), replace(BEAM, beams=200)),
    "refused: context": (
        (CollectRequest(prompt_id="long", prompt=(1,) * CONTEXT),),
        GREEDY,
    ),
    "greedy after all that": (requests(), GREEDY),
}


def make_model() -> LlamaForCausalLM:
    """Random and far from uniform; attention heads of 32, the least that vLLM has on a CPU."""
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=sorted(ENDS),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.25)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="module")
def made(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "jobs.pickle").write_bytes(pickle.dumps(JOBS))
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("run_vllm.py")), str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(draftsmith.__file__).parents[1]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == ""  # it belongs to --json
    found: dict[str, Any] = pickle.loads((folder / "made.pickle").read_bytes())
    return found


@torch.inference_mode()
def log_p(model: LlamaForCausalLM, tokens: tuple[int, ...]) -> torch.Tensor:
    """[T, V] float64: row t is the law behind token t."""
    return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def laws_of(model: LlamaForCausalLM, one: Trajectory) -> torch.Tensor:
    """[N, V]: row i is the law that y_i was drawn from."""
    law_TV = log_p(model, one.prompt + one.tokens)
    return law_TV[len(one.prompt) - 1 : -1]


def check_laws(model: LlamaForCausalLM, one: Trajectory, top_k: int) -> float:
    """The largest difference of a law, nats."""
    assert one.top is not None and len(one.top) == len(one.tokens) > 0
    assert one.top.ids_NK.shape == (len(one.tokens), top_k)
    assert (np.diff(one.top.ids_NK, axis=1) > 0).all()
    law_NV = laws_of(model, one)
    kept_NK = law_NV.gather(1, torch.from_numpy(one.top.ids_NK).long())
    off = (kept_NK - torch.from_numpy(one.top.log_p_NK)).abs().max().item()
    assert off < CLOSE
    # the K best: nothing that was left out is better than what was kept
    worst_N = law_NV.topk(top_k).values[:, -1]
    assert (kept_NK.min(-1).values > worst_N - CLOSE).all()
    own_N = law_NV.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
    assert math.isclose(one.score, own_N.sum().item(), abs_tol=CLOSE * len(one.tokens))
    return off


def by_prompt(made: list[Trajectory], count: int = 6) -> list[list[Trajectory]]:
    return [[one for one in made if one.prompt_id == f"p{i}"] for i in range(count)]


@pytest.mark.parametrize("name", ["greedy", "samples", "nucleus", "beams", "beams auto", "gold"])
def test_laws_are_those_of_transformers(
    name: str, made: dict[str, Any], model: LlamaForCausalLM
) -> None:
    asked, settings = JOBS[name]
    assert settings.top_k is not None
    trajectories: list[Trajectory] = made[name]
    off = max(check_laws(model, one, settings.top_k) for one in trajectories)
    print(
        f"vLLM {made['version']}, {name}: {len(trajectories)} trajectories, laws within {off:.1e}"
    )
    order = [request.prompt_id for request in asked]
    assert [one.prompt_id for one in trajectories] == sorted(
        (one.prompt_id for one in trajectories), key=order.index
    )
    for request, some in zip(asked, by_prompt(trajectories), strict=True):
        assert [one.index for one in some] == list(range(len(some))) and some
        assert {one.prompt for one in some} == {request.prompt}
        assert {one.forcing for one in some} == {settings.forcing}
        assert {(one.language, one.tag) for one in some} == {(request.language, request.tag)}


def test_whole_laws_hold_every_token(made: dict[str, Any], model: LlamaForCausalLM) -> None:
    for one in made["whole laws"]:
        check_laws(model, one, 300)
        np.testing.assert_allclose(np.exp(one.top.log_p_NK.astype(np.float64)).sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("name", ["greedy", "greedy after all that"])
def test_greedy_tokens_are_those_of_transformers(
    name: str, made: dict[str, Any], model: LlamaForCausalLM
) -> None:
    ended = 0
    for request, one in zip(requests(), made[name], strict=True):
        room = min(GREEDY.max_new_tokens, CONTEXT - len(request.prompt))
        out = model.generate(torch.tensor([request.prompt]), do_sample=False, max_new_tokens=room)
        theirs = tuple(out[0, len(request.prompt) :].tolist())
        if one.tokens != theirs:
            first = next(i for i, (a, b) in enumerate(zip(one.tokens, theirs)) if a != b)  # noqa: B905
            best = laws_of(model, one)[first].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"{request.prompt_id} differs at {first}"
        ended += one.tokens[-1] in ENDS
        assert not ENDS & set(one.tokens[:-1])
    assert ended > 0  # by ends of both sorts or at the limit: not all alike
    assert one.tokens and len(one.prompt) + len(one.tokens) <= CONTEXT


def test_samples_are_keyed_by_seed_and_prompt(made: dict[str, Any]) -> None:
    def texts(name: str) -> dict[tuple[str, int], tuple[int, ...]]:
        return {(one.prompt_id, one.index): one.tokens for one in made[name]}

    first = texts("samples")
    assert first == texts("samples again, others with them")
    other = texts("samples of another seed")
    greedy = {one.prompt_id: one.tokens[:12] for one in made["greedy"]}
    for one in made["samples"]:
        key = (one.prompt_id, one.index)
        if one.temperature == 0:  # all samples at temperature 0 are one
            assert one.index == 0 and first[key] == other[key] == greedy[one.prompt_id]
    drawn = [one for one in made["samples"] if one.temperature]
    assert [one.temperature for one in drawn[:4]] == [0.7, 0.7, 1.3, 1.3]
    assert len({one.tokens for one in drawn}) == len(drawn)
    assert all(first[one.prompt_id, one.index] != other[one.prompt_id, one.index] for one in drawn)


def test_a_nucleus_is_kept_to(made: dict[str, Any], model: LlamaForCausalLM) -> None:
    for one in made["nucleus"]:
        for law_V, token in zip(laws_of(model, one).exp(), one.tokens, strict=True):
            above = law_V[law_V > law_V[token] + 1e-6].sum().item()
            assert above < 0.3 + 1e-4


def test_draws_follow_the_law_at_their_temperature(
    made: dict[str, Any], model: LlamaForCausalLM
) -> None:
    """Chi-square over the 7 best tokens and the rest: above 40 once in 800,000 seeds."""
    drawn = [one.tokens[0] for one in made["many draws"]]
    law_V = (log_p(model, requests()[2].prompt)[-1] / 0.6).softmax(-1)
    best = law_V.topk(7).indices.tolist()
    seen = np.array([*(drawn.count(token) for token in best), 0.0])
    wanted = np.array([*law_V[best].tolist(), 0.0])
    seen[-1], wanted[-1] = len(drawn) - seen.sum(), 1 - wanted.sum()
    wanted *= len(drawn)
    assert len(drawn) == 600 and wanted.min() > 5
    assert ((seen - wanted) ** 2 / wanted).sum() < 40


def reference_beams(
    model: LlamaForCausalLM, prompt: tuple[int, ...], width: int, limit: int
) -> list[tuple[float, tuple[int, ...]]]:
    """vLLM's rule written out: every end among the 2 * width best tokens of a beam counts."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(limit):
        grown = []
        for score, tokens in live:
            best = log_p(model, prompt + tokens)[-1].topk(2 * width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                longer = (score + value, (*tokens, token))
                (done if token == 0 else grown).append(longer)
        live = sorted(grown, reverse=True)[:width]
    cut = {}
    for _, tokens in sorted(done + live, reverse=True)[:width]:
        kept = tuple(until_end(list(tokens), ENDS))
        law_TV = log_p(model, prompt + kept)[len(prompt) - 1 : -1]
        cut[kept] = law_TV.gather(1, torch.tensor(kept)[:, None]).sum().item()
    return sorted(((score, tokens) for tokens, score in cut.items()), reverse=True)


def test_beams_are_the_best_of_the_search_in_order(
    made: dict[str, Any], model: LlamaForCausalLM
) -> None:
    cut = 0
    for request, some in zip(requests(), by_prompt(made["beams"]), strict=True):
        limit = min(BEAM.max_new_tokens, CONTEXT - len(request.prompt) - 1)
        wanted = reference_beams(model, request.prompt, 4, limit)
        assert [one.score for one in some] == sorted((one.score for one in some), reverse=True)
        np.testing.assert_allclose(
            [one.score for one in some], [score for score, _ in wanted], atol=NEAR_TIE
        )
        assert {one.tokens for one in some} == {tokens for _, tokens in wanted}
        cut += sum(len(one.tokens) < limit for one in some)
        assert not any(ENDS & set(one.tokens[:-1]) for one in some)
    assert cut > 0  # some beams ended


def test_auto_keeps_beams_while_they_add_probability(made: dict[str, Any]) -> None:
    counts = set()
    for all_four, kept in zip(by_prompt(made["beams"]), by_prompt(made["beams auto"]), strict=True):
        mass = np.exp([one.score for one in all_four])
        wanted = 1
        while wanted < len(mass) and mass[wanted] >= 0.3 * mass[:wanted].sum():
            wanted += 1
        assert [one.tokens for one in kept] == [one.tokens for one in all_four[:wanted]]
        counts.add(wanted)
    assert len(counts) > 1


def test_references_are_scored_as_given_up_to_their_end(made: dict[str, Any]) -> None:
    for request, some in zip(requests(), by_prompt(made["gold"]), strict=True):
        room = min(GOLD.max_new_tokens, CONTEXT - len(request.prompt) - 1)
        wanted = [tokens[:room] for tokens in request.references]
        wanted[1] = request.references[1][:5][:room]  # it ends at 20
        assert [one.tokens for one in some] == wanted


def test_what_vllm_cannot_do_is_refused_in_a_sentence(made: dict[str, Any]) -> None:
    for name, word in [
        ("signals", "hidden states"),
        ("temperature", "0.01"),
        ("length penalty", "length_penalty 0"),
        ("beams", "at most 150 beams"),
        ("context", "'long'"),
    ]:
        said = made[f"refused: {name}"]
        assert isinstance(said, str) and word in said, said
