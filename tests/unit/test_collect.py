"""Collected trajectories against a plain forward of the same model, and against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.cache import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.distill.trajectories import teacher
from draftsmith.distill.trajectories.collect import (
    TransformersBackend,
    check_request,
    check_settings,
    draws,
)
from draftsmith.distill.trajectories.teacher import TeacherCost, score_texts, stable_top
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.targets import base
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

VOCAB = 20
ENDS = frozenset({2, 5})
PROMPTS = [(7,), (1, 3, 3, 9, 1, 3), (4, 6), (4, 6), (0, 1, 8, 11, 14, 3, 9, 9, 2, 1, 0)]
REFERENCES = ((9, 9, 1), (5,), (1, 2, 3), tuple(range(6, 18)))
WAYS = {
    "greedy": CollectSettings(forcing="greedy"),
    "sample": CollectSettings(
        forcing="sample", temperatures=(1.3, 0.7), samples=2, top_p=0.95, seed=4
    ),
    "beam": CollectSettings(forcing="beam", beams=3),
    "auto": CollectSettings(forcing="beam", beams="auto", max_beams=8, mass_gain=0.3),
    "gold": CollectSettings(forcing="gold"),
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(VOCAB, end_ids=ENDS, max_length=64)


def requests(prompts: Sequence[tuple[int, ...]] = PROMPTS) -> list[CollectRequest]:
    return [
        CollectRequest(
            prompt_id=f"p{i}", prompt=prompt, references=REFERENCES, language="eo", tag="t"
        )
        for i, prompt in enumerate(prompts)
    ]


def text(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Trajectory:
    return Trajectory(prompt_id="t", forcing="gold", prompt=prompt, tokens=tokens, score=0.0)


def settings(way: str, **changes: object) -> CollectSettings:
    return replace(WAYS[way], **({"max_new_tokens": 10, "top_k": 4} | changes))


def same(found: Sequence[Trajectory], wanted: Sequence[Trajectory]) -> None:
    """Token for token; numbers within what float32 holds."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        bare = {"top": None, "features": None, "score": 0.0}
        assert replace(one, **bare) == replace(other, **bare)
        assert abs(one.score - other.score) < 1e-9
        assert one.top is not None and other.top is not None
        np.testing.assert_array_equal(one.top.ids_NK, other.top.ids_NK)
        np.testing.assert_allclose(one.top.log_p_NK, other.top.log_p_NK, atol=1e-6)
        assert (one.features is None) == (other.features is None)
        if one.features is not None and other.features is not None:
            np.testing.assert_allclose(one.features, other.features, atol=1e-6)


def plain_log_p(target: HFTarget, one: Trajectory) -> torch.Tensor:
    """[len(tokens), V] by the bare model with its own attention, one text at a time."""
    with target.native() as model, torch.inference_mode():
        logits = model(torch.tensor([[*one.prompt, *one.tokens]]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)[len(one.prompt) - 1 : -1]


# --------------------------------------------------------------------------- laws


@pytest.mark.parametrize("way", WAYS)
def test_laws_and_scores_are_those_of_a_plain_forward(target: HFTarget, way: str) -> None:
    wanted = settings(way)
    for one in TransformersBackend(target, batch_size=5).collect(requests(), wanted):
        log_p_NV = plain_log_p(target, one)
        chosen = log_p_NV.gather(1, torch.tensor(one.tokens)[:, None])
        assert abs(one.score - float(chosen.sum())) < 1e-5
        values_NK, ids_NK = log_p_NV.topk(4)
        ids_NK, order_NK = ids_NK.sort(dim=-1)
        assert one.top is not None
        assert one.top.ids_NK.dtype == np.int32 and one.top.log_p_NK.dtype == np.float32
        np.testing.assert_array_equal(one.top.ids_NK, ids_NK)
        np.testing.assert_allclose(one.top.log_p_NK, values_NK.gather(1, order_NK), atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_whole_laws_sum_to_one_and_hold_the_truncated_ones(target: HFTarget, way: str) -> None:
    backend = TransformersBackend(target, batch_size=4)
    cut = backend.collect(requests(), settings(way))
    whole = backend.collect(requests(), settings(way, top_k=None))
    full = backend.collect(requests(), settings(way, top_k=VOCAB))
    same(full, whole)
    for one, other in zip(cut, whole, strict=True):
        assert one.top is not None and other.top is not None
        assert other.top.ids_NK.tolist() == [list(range(VOCAB))] * len(one.tokens)
        np.testing.assert_allclose(np.exp(other.top.log_p_NK).sum(-1), 1.0, atol=1e-5)
        picked = np.take_along_axis(other.top.log_p_NK, one.top.ids_NK, axis=1)
        np.testing.assert_allclose(one.top.log_p_NK, picked, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("signals", [Signals(), Signals(last_hidden=True, layers=(0, 1))])
@pytest.mark.every(3)
def test_a_trajectory_does_not_depend_on_its_batch(
    target: HFTarget, way: str, signals: Signals
) -> None:
    wanted = settings(way, signals=signals)
    alone = TransformersBackend(target, batch_size=1).collect(requests(), wanted)
    for batch_size in (2, 3, 50):
        same(TransformersBackend(target, batch_size=batch_size).collect(requests(), wanted), alone)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_parts_and_in_another_order_gives_the_same(target: HFTarget, way: str) -> None:
    backend = TransformersBackend(target, batch_size=3)
    asked, wanted = requests(), settings(way)
    whole = backend.collect(asked, wanted)
    parts = backend.collect(asked[:2], wanted) + backend.collect(asked[2:], wanted)
    same(parts, whole)
    turned = backend.collect(asked[::-1], wanted)
    turned.sort(key=lambda one: (one.prompt_id, one.index))
    same(turned, whole)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("signals", [Signals(), Signals(last_hidden=True)])
@pytest.mark.every(3)
def test_long_texts_in_pieces_give_the_same(
    target: HFTarget, way: str, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TransformersBackend(target, batch_size=4)
    wanted = settings(way, signals=signals)
    whole = backend.collect(requests(), wanted)
    monkeypatch.setattr(base, "CHUNK", 3)
    monkeypatch.setattr(teacher, "LOGITS_AT_ONCE", 2 * 4 * VOCAB)  # two places of four rows
    same(backend.collect(requests(), wanted), whole)


def test_no_forward_returns_more_logits_than_allowed(
    target: HFTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    forward = HFTarget.forward

    def watched(self: HFTarget, *args: object) -> object:
        out = forward(self, *args)
        seen.append(out.logits_BNV.numel())
        return out

    monkeypatch.setattr(HFTarget, "forward", watched)
    monkeypatch.setattr(teacher, "LOGITS_AT_ONCE", 3 * 2 * VOCAB)
    texts = [text(PROMPTS[4], tuple(range(VOCAB))), text((3,), (4, 2))]
    score_texts(target, texts, top_k=3, signals=Signals(), cost=TeacherCost())
    assert max(seen) == 3 * 2 * VOCAB


def test_equal_prompts_are_read_once(target: HFTarget) -> None:
    """Eleven tokens of prompt and 2 + 3 of continuations, of which the last need no forward."""
    prompt = PROMPTS[4]
    texts = [text(prompt, (1, 2)), text(prompt, (3, 4, 5))]
    cost = TeacherCost()
    both = score_texts(target, texts, top_k=4, signals=Signals(layers=(1,)), cost=cost)
    assert cost.tokens == 10 + (1 + 2) + (1 + 3)
    for bare, scored in zip(texts, both, strict=True):
        (alone,) = score_texts(
            target, [bare], top_k=4, signals=Signals(layers=(1,)), cost=TeacherCost()
        )
        same([scored], [alone])


def test_equal_logits_are_cut_at_the_lowest_tokens() -> None:
    scores = torch.zeros(2, 300)
    scores[0, [250, 17]] = 1.0
    scores[1, 5] = -1.0
    values, ids = stable_top(scores, 4)
    assert ids.tolist() == [[17, 250, 0, 1], [0, 1, 2, 3]]
    assert values.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]
    for k in (1, 3, 65, 300):  # ties within and beyond what is looked at
        rough = torch.randint(0, 9, (4, 300), generator=torch.Generator().manual_seed(k)).float()
        wanted = rough.sort(dim=-1, descending=True, stable=True)
        values, ids = stable_top(rough, k)
        assert torch.equal(values, wanted.values[:, :k]) and torch.equal(ids, wanted.indices[:, :k])


# --------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("way", WAYS)
def test_nothing_stands_behind_the_end(target: HFTarget, way: str) -> None:
    wanted = settings(way, max_new_tokens=3)
    found = TransformersBackend(target, batch_size=4).collect(requests(), wanted)
    ended = 0
    for one in found:
        assert one.tokens and not set(one.tokens[:-1]) & ENDS
        ended += one.tokens[-1] in ENDS
        assert one.tokens[-1] in ENDS or len(one.tokens) == 3
    assert 0 < ended < len(found)


def test_greedy_texts_are_those_of_generate(target: HFTarget) -> None:
    found = TransformersBackend(target, batch_size=3).collect(requests(), settings("greedy"))
    texts = generate(target, NoDrafter(), PROMPTS, DecodeOptions(max_new_tokens=10))
    assert [one.tokens for one in found] == [text.token_ids for text in texts]
    assert {(one.forcing, one.index, one.temperature) for one in found} == {("greedy", 0, None)}
    one_beam = TransformersBackend(target).collect(requests(), settings("beam", beams=1))
    assert [one.tokens for one in one_beam] == [one.tokens for one in found]


def test_beams_come_best_first(target: HFTarget) -> None:
    found = TransformersBackend(target, batch_size=7).collect(requests(), settings("beam"))
    assert [one.index for one in found] == [0, 1, 2] * len(PROMPTS)
    for start in range(0, len(found), 3):
        scores = [one.score for one in found[start : start + 3]]
        assert scores == sorted(scores, reverse=True)
        assert len({one.tokens for one in found[start : start + 3]}) == 3


def test_auto_keeps_fewer_beams_where_one_is_clear(target: HFTarget) -> None:
    found = TransformersBackend(target, batch_size=16).collect(requests(), settings("auto"))
    numbers = [sum(one.prompt_id == f"p{i}" for one in found) for i in range(len(PROMPTS))]
    assert min(numbers) >= 1 and max(numbers) <= 8 and len(set(numbers)) > 1


def test_references_are_cut_at_the_end_and_at_the_limit(target: HFTarget) -> None:
    backend = TransformersBackend(target, batch_size=3)
    found = backend.collect(requests(PROMPTS[:1]), settings("gold"))
    assert [one.tokens for one in found] == [(9, 9, 1), (5,), (1, 2), tuple(range(6, 16))]
    assert [one.index for one in found] == [0, 1, 2, 3]
    full = CollectRequest(prompt_id="long", prompt=(1,) * 60, references=((3,) * 9,))
    (one,) = backend.collect([full], settings("gold"))
    assert one.tokens == (3,) * 4  # a context of 64


@pytest.mark.parametrize("way", ["greedy", "sample", "beam"])
def test_the_context_is_respected(target: HFTarget, way: str) -> None:
    near = [CollectRequest(prompt_id=f"{n}", prompt=(9,) * n) for n in (58, 63)]
    found = TransformersBackend(target).collect(near, settings(way, max_new_tokens=30))
    for one in found:
        room = 64 - len(one.prompt)
        assert len(one.tokens) == room or one.tokens[-1] in ENDS
        assert len(one.tokens) <= room


def test_labels_of_the_prompt_are_kept(target: HFTarget) -> None:
    for one in TransformersBackend(target).collect(requests(), settings("sample")):
        place = int(one.prompt_id[1:])
        assert (one.prompt, one.language, one.tag) == (PROMPTS[place], "eo", "t")


# --------------------------------------------------------------------------- samples


def test_samples_are_reproducible_and_differ(target: HFTarget) -> None:
    def texts(seed: int) -> list[tuple[int, ...]]:
        wanted = settings("sample", temperatures=(1.5,), samples=5, seed=seed, max_new_tokens=30)
        return [one.tokens for one in TransformersBackend(target).collect(requests(), wanted)]

    first = texts(0)
    assert texts(0) == first
    assert texts(1) != first
    assert len(set(first)) > 20  # of 25, many of which end early


def test_prompts_that_are_equal_are_sampled_apart(target: HFTarget) -> None:
    wanted = settings("sample", temperatures=(1.5,), samples=4, max_new_tokens=20)
    twins = requests([(4, 6), (4, 6)])
    found = TransformersBackend(target).collect(twins, wanted)
    assert {one.tokens for one in found[:4]}.isdisjoint({one.tokens for one in found[4:]})


def test_samples_go_temperature_by_temperature_and_greedy_ones_once() -> None:
    wanted = CollectSettings(forcing="sample", temperatures=(0.0, 0.3, 1.0), samples=2)
    (request, *_) = requests()
    found = [(one.index, one.temperature, one.sample) for one in draws(request, wanted)]
    assert found == [(0, 0.0, 0), (1, 0.3, 0), (2, 0.3, 1), (3, 1.0, 0), (4, 1.0, 1)]


def test_temperatures_are_noted_and_do_not_touch_the_laws(target: HFTarget) -> None:
    wanted = settings("sample", temperatures=(0.0, 2.0), samples=3)
    found = TransformersBackend(target, batch_size=4).collect(requests(), wanted)
    assert [(one.index, one.temperature) for one in found[:4]] == [
        *((0, 0.0), (1, 2.0), (2, 2.0), (3, 2.0))
    ]
    greedy = TransformersBackend(target).collect(requests(), settings("greedy"))
    for cold, one in zip(found[::4], greedy, strict=True):
        same([replace(cold, forcing="greedy", temperature=None)], [one])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.4, 0.8)])
def test_first_tokens_are_drawn_from_the_law(temperature: float, top_p: float) -> None:
    """Chi-square of 3,000 samples: a right law exceeds df + 10 sqrt(2 df) at most five times in a
    million."""
    toy = TabularTarget(8, seed=2, scale=0.7)
    wanted = CollectSettings(
        forcing="sample",
        temperatures=(temperature,),
        samples=3000,
        top_p=top_p,
        max_new_tokens=1,
        top_k=1,
    )
    request = CollectRequest(prompt_id="only", prompt=(3, 1))
    found = TransformersBackend(toy, batch_size=500).collect([request], wanted)
    seen_V = np.bincount([one.tokens[0] for one in found], minlength=8)
    law = Sampler(temperature=temperature, top_p=top_p).law(toy.logits_after([3, 1])[None])
    probs_V = law.probs()[0].numpy()
    assert seen_V[probs_V == 0].sum() == 0
    expected_V = 3000 * probs_V[probs_V > 0]
    assert expected_V.min() > 5
    statistic = float(((seen_V[probs_V > 0] - expected_V) ** 2 / expected_V).sum())
    freedom = len(expected_V) - 1
    assert statistic < freedom + 10 * math.sqrt(2 * freedom)


# --------------------------------------------------------------------------- signals


@pytest.mark.parametrize("way", WAYS)
def test_features_are_the_hidden_states_of_every_position(target: HFTarget, way: str) -> None:
    wanted = settings(way, signals=Signals(last_hidden=True, layers=(0,)))
    for one in TransformersBackend(target, batch_size=4).collect(requests(), wanted):
        with target.native() as model, torch.inference_mode():
            out = model(torch.tensor([[*one.prompt, *one.tokens]]), output_hidden_states=True)
        # hidden_states: embedding, layer 0, ..., and after the final norm
        states_TS = torch.cat([out.hidden_states[1][0], out.hidden_states[-1][0]], -1)
        assert one.features is not None and one.features.dtype == np.float32
        assert one.features.shape == (len(one.prompt) + len(one.tokens), 64)
        np.testing.assert_allclose(one.features, states_TS, atol=1e-4)


def test_signals_change_nothing_else(target: HFTarget) -> None:
    for way in WAYS:
        backend = TransformersBackend(target, batch_size=4)
        bare = backend.collect(requests(), settings(way))
        heard = backend.collect(requests(), settings(way, signals=Signals(layers=(1,))))
        same([replace(one, features=None) for one in heard], bare)


# --------------------------------------------------------------------------- around


def test_progress_counts_whole_prompts(target: HFTarget) -> None:
    told: list[tuple[int, int]] = []
    backend = TransformersBackend(
        target, batch_size=4, on_done=lambda prompts, tokens: told.append((prompts, tokens))
    )
    found = backend.collect(requests(), settings("sample"))
    assert len(told) == 6  # ten samples of either temperature, four at a time
    assert told == sorted(told)
    assert told[2][0] == 0  # the second temperature has not begun
    assert told[-1] == (len(PROMPTS), sum(len(one.tokens) for one in found))


def test_cost_counts_what_the_teacher_computed(target: HFTarget) -> None:
    backend = TransformersBackend(target, batch_size=2)
    found = backend.collect(requests(PROMPTS[:2]), settings("greedy"))
    prompts = sum(len(prompt) for prompt in PROMPTS[:2])
    assert backend.cost.tokens == prompts + sum(len(one.tokens) - 1 for one in found)
    assert backend.cost.forwards == max(len(one.tokens) for one in found)


def test_nothing_asked_nothing_given(target: HFTarget) -> None:
    assert TransformersBackend(target).collect([], settings("greedy")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": VOCAB + 1}, "--top-k"),
        ({"top_k": 0}, "--top-k"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"samples": 0}, "--samples"),
        ({"temperatures": ()}, "--temperatures"),
        ({"temperatures": (1.0, -1.0)}, "temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"beams": 0}, "--beams"),
        ({"max_beams": 0}, "--max-beams"),
        ({"mass_gain": -0.1}, "--mass-gain"),
        ({"length_penalty": math.inf}, "--length-penalty"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    target: HFTarget, change: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_settings(settings("sample", **change), target)
    with pytest.raises(InputError, match=words):
        TransformersBackend(target).collect(requests(), settings("sample", **change))


@pytest.mark.parametrize(
    ("way", "prompt", "references", "words"),
    [
        ("greedy", (), (), "'x' of 0 tokens .*: empty prompt"),
        ("greedy", (1,) * 64, (), "'x' of 64 tokens .*: longer than the context of 64"),
        (
            "greedy",
            (1, VOCAB),
            (),
            f"'x' .*: token outside the vocabulary of {VOCAB}",
        ),
        ("gold", (1,), (), "no reference"),
        ("gold", (1,), ((1, 2), ()), "empty reference"),
        ("gold", (1,), ((1, -1),), f"token of a reference outside the vocabulary of {VOCAB}"),
    ],
)
def test_prompts_that_cannot_be_are_refused(
    target: HFTarget,
    way: str,
    prompt: tuple[int, ...],
    references: tuple[tuple[int, ...], ...],
    words: str,
) -> None:
    request = CollectRequest(prompt_id="x", prompt=prompt, references=references)
    with pytest.raises(InputError, match=words):
        check_request(request, settings(way), target)
    with pytest.raises(InputError, match="Prompt 'x'"):
        TransformersBackend(target).collect([*requests(), request], settings(way))


def test_prompts_that_can_be_pass(target: HFTarget) -> None:
    for way in WAYS:
        for request in requests():
            check_request(request, settings(way), target)
    longest = CollectRequest(prompt_id="x", prompt=(1,) * 63, references=((VOCAB,),))
    check_request(longest, settings("greedy"), target)  # its reference is not used


def test_a_target_without_hidden_states_says_so() -> None:
    class Mute(TabularTarget):
        def forward(
            self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals
        ) -> TargetOutput:
            return super().forward(tokens_BT, block, keep, Signals())

    wanted = CollectSettings(max_new_tokens=2, top_k=2, signals=Signals(last_hidden=True))
    with pytest.raises(InputError, match=r"tabular.*hidden states"):
        TransformersBackend(Mute(8)).collect(requests([(1, 2)]), wanted)


def test_broken_logits_are_not_stored() -> None:
    broken = TabularTarget(VOCAB)
    broken.table_CV[:] = math.nan
    with pytest.raises(BackendError, match="NaN"):
        TransformersBackend(broken).collect(requests([(1, 2)]), settings("gold"))


def test_a_batch_of_nothing_is_refused(target: HFTarget) -> None:
    with pytest.raises(InputError, match="batch_size"):
        TransformersBackend(target, batch_size=0)
