"""Beam search against enumeration, against a naive search on lists, and against transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.core.cache import Block
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.distill.trajectories import beams
from draftsmith.distill.trajectories.beams import (
    Hypothesis,
    auto_search,
    beam_search,
    worthwhile,
)
from draftsmith.distill.trajectories.teacher import TeacherCost, score_texts
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

from ..tiny_models import tiny_model

ENDS = frozenset({2, 3, 5})
PENALTIES = [0.0, 0.7, 1.0, -0.5]


def log_p_after(target: TabularTarget, text: Sequence[int]) -> list[float]:
    """Straight from the table."""
    return target.logits_after(list(text)).log_softmax(-1).tolist()


def every_text(
    target: TabularTarget, prompt: Sequence[int], longest: int
) -> list[tuple[tuple[int, ...], float]]:
    """All continuations that end or are `longest` tokens long, with their log-probabilities."""
    out, growing = [], [((), 0.0)]
    while growing:
        tokens, score = growing.pop()
        for token, log_p in enumerate(log_p_after(target, [*prompt, *tokens])):
            longer = ((*tokens, token), score + log_p)
            done = token in target.end_ids or len(longer[0]) == longest
            (out if done else growing).append(longer)
    return out


def naive_search(
    target: TabularTarget, prompt: Sequence[int], width: int, longest: int, penalty: float
) -> list[tuple[tuple[int, ...], float]]:
    """The same rules on lists, without a cache; it never stops before it must."""
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, longest + 1):
        candidates = []
        for tokens, score in live:
            log_p = log_p_after(target, [*prompt, *tokens])
            best_first = sorted(range(len(log_p)), key=lambda token: (-log_p[token], token))
            candidates += [((*tokens, token), score + log_p[token]) for token in best_first]
        candidates.sort(key=lambda pair: -pair[1])
        ends = [pair[0][-1] in target.end_ids or length == longest for pair in candidates]
        finished += [p for p, end in zip(candidates[:width], ends, strict=False) if end]
        live = [p for p, end in zip(candidates, ends, strict=True) if not end][:width]
        if not live or (width == 1 and finished):
            break
    finished.sort(key=lambda pair: -pair[1] / len(pair[0]) ** penalty)
    return finished[:width]


def same(found: list[Hypothesis], wanted: list[tuple[tuple[int, ...], float]]) -> None:
    assert [one.tokens for one in found] == [tokens for tokens, _ in wanted]
    np.testing.assert_allclose(
        [one.score for one in found], [score for _, score in wanted], rtol=0, atol=1e-9
    )


# --------------------------------------------------------------------------- enumeration


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("vocab", "ends"), [(8, {0}), (5, {1, 3}), (6, set())])
def test_a_wide_beam_finds_exactly_the_best_texts(
    vocab: int, ends: set[int], penalty: float
) -> None:
    longest, prompts = 4, [[1], [2, 4, 0], [3, 3]]
    # a law for every context: sums of the same terms in another order would tie
    target = TabularTarget(vocab, order=longest, seed=vocab, end_ids=frozenset(ends))
    width = vocab ** (longest - 1)  # no beginning of a text is ever dropped
    found = beam_search(
        target, prompts, width=width, max_new_tokens=longest, length_penalty=penalty
    )
    for prompt, hypotheses in zip(prompts, found, strict=True):
        everything = every_text(target, prompt, longest)
        everything.sort(key=lambda pair: -pair[1] / len(pair[0]) ** penalty)
        same(hypotheses, everything[:width])


def test_fewer_only_if_the_tree_has_fewer() -> None:
    """With {a, end} there are six texts of up to five tokens: end, a end, ..., aaaa end, aaaaa."""
    target = TabularTarget(2, end_ids=frozenset({1}))
    (found,) = beam_search(target, [[0]], width=50, max_new_tokens=5)
    assert sorted(one.tokens for one in found) == sorted(
        [*((0,) * n + (1,) for n in range(5)), (0,) * 5]
    )
    assert math.isclose(sum(math.exp(one.score) for one in found), 1.0)
    (found,) = beam_search(target, [[0]], width=4, max_new_tokens=5)
    assert len(found) == 4


def test_what_is_impossible_is_never_found() -> None:
    target = TabularTarget(4, end_ids=frozenset({0}))
    target.table_CV[:, 2:] = -math.inf  # leaves {1, end}
    (found,) = beam_search(target, [[1]], width=30, max_new_tokens=3)
    assert {one.tokens for one in found} == {(0,), (1, 0), (1, 1, 0), (1, 1, 1)}


# --------------------------------------------------------------------------- narrow beams


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_narrow_beams_equal_a_search_on_lists(width: int, penalty: float) -> None:
    prompts = [[7], [1, 2, 3], [4, 6], [0, 0, 0, 0, 1]]
    for seed in range(6):
        ends = ENDS if seed % 2 else frozenset()
        target = TabularTarget(8, order=4, seed=seed, scale=1.0, end_ids=ends)
        found = beam_search(target, prompts, width=width, max_new_tokens=9, length_penalty=penalty)
        for prompt, hypotheses in zip(prompts, found, strict=True):
            same(hypotheses, naive_search(target, prompt, width, 9, penalty))


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("make", [TabularTarget, tiny_target])
@pytest.mark.every(3)
def test_a_beam_of_one_is_greedy_decoding(make: type[TabularTarget], penalty: float) -> None:
    prompts = [[7], [1, 2, 3], [4, 6], [0, 0, 0, 0, 1]]
    for seed in range(4):
        target = make(8, seed=seed, end_ids=frozenset({2, 5}))
        options = DecodeOptions(max_new_tokens=20)
        greedy = generate(target, NoDrafter(), prompts, options, batch_size=4)
        found = beam_search(target, prompts, width=1, max_new_tokens=20, length_penalty=penalty)
        assert [[one.tokens for one in some] for some in found] == [
            [one.token_ids] for one in greedy
        ]


def test_equal_scores_go_to_the_better_parent_then_the_lower_token() -> None:
    target = TabularTarget(3, scale=0.0)  # every text is as probable as any other of its length
    (found,) = beam_search(target, [[0]], width=4, max_new_tokens=2)
    assert [one.tokens for one in found] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    target = TabularTarget(30, order=1, scale=0.0)
    target.table_CV[:, ::3] = 1.0  # two kinds of tokens
    (found,) = beam_search(target, [[0]], width=300, max_new_tokens=2)
    everything = itertools.product(range(30), repeat=2)
    likely = [token % 3 == 0 for token in range(30)]
    assert [one.tokens for one in found] == sorted(
        everything, key=lambda t: (-likely[t[0]] - likely[t[1]], not likely[t[0]], t)
    )[:300]
    wide = TabularTarget(500, order=1, scale=0.0)  # more ties than are looked at at once
    (found,) = beam_search(wide, [[0]], width=3, max_new_tokens=1)
    assert [one.tokens for one in found] == [(0,), (1,), (2,)]


def test_a_search_goes_on_while_a_long_text_may_still_win() -> None:
    """b is improbable and then certain: with a penalty, twenty of them beat two early ends."""
    target = TabularTarget(4, order=1, end_ids=frozenset({0}))
    target.table_CV[3 + 1] = torch.tensor([0.60, 0.35, 0.05, 1e-9]).log()  # after the prompt
    target.table_CV[1 + 1] = torch.tensor([0.99, 0.003, 0.003, 0.004]).log()  # after a
    target.table_CV[2 + 1] = torch.tensor([1e-9, 1e-9, 1.0, 1e-9]).log()  # after b
    (found,) = beam_search(target, [[3]], width=2, max_new_tokens=20, length_penalty=1.0)
    assert [one.tokens for one in found] == [(2,) * 20, (0,)]
    (found,) = beam_search(target, [[3]], width=2, max_new_tokens=20)
    assert [one.tokens for one in found] == [(0,), (1, 0)]


# --------------------------------------------------------------------------- real attention


@pytest.mark.parametrize("slack", [0, beams.SLACK])
@pytest.mark.parametrize("ends", [{299}, {3, *range(40, 60), *range(100, 140)}])
@pytest.mark.every(3)
def test_transformers_finds_the_same(
    ends: set[int], slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules are ours with `early_stopping="never"`; it sums in float32."""
    monkeypatch.setattr(beams, "SLACK", slack)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8], [90, 91]]
    target = HFTarget(tiny_model().double(), end_ids=frozenset(ends))
    for width, penalty in [(2, 0.0), (4, 1.0), (5, 0.6), (3, -0.5)]:
        found = beam_search(target, prompts, width=width, max_new_tokens=12, length_penalty=penalty)
        for prompt, hypotheses in zip(prompts, found, strict=True):
            with target.native() as model, torch.inference_mode():
                theirs = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                    num_beams=width,
                    num_return_sequences=width,
                    do_sample=False,
                    early_stopping="never",
                    length_penalty=penalty,
                    max_new_tokens=12,
                    eos_token_id=sorted(ends),
                    pad_token_id=min(ends),
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            texts = [one.tokens for one in hypotheses]
            assert texts == [
                tuple(row[len(prompt) :][: len(text)])
                for row, text in zip(theirs.sequences.tolist(), texts, strict=True)
            ]
            assert all(set(text[:-1]).isdisjoint(ends) for text in texts)
            np.testing.assert_allclose(
                [one.score / len(one.tokens) ** penalty for one in hypotheses],
                theirs.sequences_scores.numpy(),
                rtol=1e-5,
            )


@pytest.mark.parametrize("slack", [0, 5, beams.SLACK])
def test_a_search_does_not_depend_on_its_neighbours(
    slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths that end at different times, together and one by one."""
    prompts = [[7], [1, 2, 3], [4, 6] * 20, [0, 0, 0, 0, 1], [9, 8, 7, 6]]
    target = tiny_target(16, end_ids=frozenset({2, 5}))
    alone = [beam_search(target, [p], width=3, max_new_tokens=30) for p in prompts]
    assert len({len(one.tokens) for (found,) in alone for one in found}) > 2
    monkeypatch.setattr(beams, "SLACK", slack)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        together = beam_search(target, [prompts[i] for i in order], width=3, max_new_tokens=30)
        for i, found in zip(order, together, strict=True):
            same(found, [(one.tokens, one.score) for one in alone[i][0]])


def windowed_target() -> HFTarget:
    """Attention that sees four positions back: a column that moved must keep its position."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.25)
    return HFTarget(model.double(), end_ids=frozenset({3, 7}))


@pytest.mark.parametrize("slack", [0, beams.SLACK])
@pytest.mark.parametrize("make", [lambda: tiny_target(24), windowed_target])
def test_laws_of_the_search_are_those_of_the_whole_text(
    make: type[HFTarget], slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beams, "SLACK", slack)
    target = make()
    prompts = [(7,), (1, 2, 3, 9, 9, 1, 4), (4, 6)]
    for prompt, found in zip(
        prompts, beam_search(target, prompts, width=5, max_new_tokens=25, top_k=6), strict=True
    ):
        texts = [
            Trajectory(prompt_id="t", forcing="beam", prompt=prompt, tokens=one.tokens, score=0.0)
            for one in found
        ]
        whole = score_texts(target, texts, top_k=6, signals=Signals(), cost=TeacherCost())
        for one, scored in zip(found, whole, strict=True):
            assert one.top is not None and scored.top is not None
            assert len(one.top) == len(one.tokens)
            np.testing.assert_array_equal(one.top.ids_NK, scored.top.ids_NK)
            np.testing.assert_allclose(one.top.log_p_NK, scored.top.log_p_NK, atol=1e-6)
            assert abs(one.score - scored.score) < 1e-9


def test_the_context_limits_a_search() -> None:
    target = tiny_target(16, max_length=12)
    short, long = beam_search(target, [[1, 2], list(range(11))], width=3, max_new_tokens=30)
    assert {len(one.tokens) for one in short} == {10}
    assert {len(one.tokens) for one in long} == {1}


# --------------------------------------------------------------------------- cost


def test_a_prompt_that_is_done_costs_nothing_more() -> None:
    """Three tokens of a prompt, then one per live beam and step, until nothing can win."""
    target = TabularTarget(3, order=1, end_ids=frozenset({0}))
    target.table_CV[:] = torch.tensor([20.0, 1.0, 0.0]).double()  # ends at once, or nearly
    cost = TeacherCost()
    (found,) = beam_search(target, [[1, 1, 2]], width=2, max_new_tokens=50, cost=cost)
    assert [one.tokens for one in found] == [(0,), (1, 0)]
    assert (cost.forwards, cost.tokens) == (2, 3 + 2)


def test_a_wide_search_costs_one_token_per_live_beam() -> None:
    cost = TeacherCost()
    beam_search(TabularTarget(5), [[1], [2, 3]], width=3, max_new_tokens=4, cost=cost)
    assert (cost.forwards, cost.tokens) == (4, 3 + 2 * 3 * 3)


# --------------------------------------------------------------------------- auto


def test_hypotheses_are_kept_while_they_add_probability() -> None:
    halves = [math.log(p) for p in (0.5, 0.25, 0.125)]  # gains: 1/2, then 1/6
    assert [worthwhile(halves, gain) for gain in (0.6, 0.51, 0.49, 0.17, 0.16, 0.0)] == [
        *(1, 1, 2, 2, 3, 3)
    ]
    far = [score - 5000 for score in halves]  # probabilities that no float holds
    assert [worthwhile(far, gain) for gain in (0.6, 0.49, 0.16)] == [1, 2, 3]
    assert worthwhile([-1.0], 0.5) == 1
    # under a length penalty the best text need not be the most probable one
    assert worthwhile([math.log(0.1), math.log(0.8)], 0.5) == 2


@pytest.mark.parametrize("most_beams", [1, 9, 100])
@pytest.mark.parametrize("gain", [0.02, 0.3, 0.7])
def test_auto_keeps_of_the_full_search_what_is_worth_it(gain: float, most_beams: int) -> None:
    prompts = [[7], [1, 2, 3], [4, 6]]
    target = TabularTarget(6, seed=3, end_ids=frozenset({0}))
    found = auto_search(
        target, prompts, max_width=16, mass_gain=gain, max_new_tokens=6, most_beams=most_beams
    )
    for prompt, kept in zip(prompts, found, strict=True):
        widths = [4, 8, 16]
        for width in widths:
            (full,) = beam_search(target, [prompt], width=width, max_new_tokens=6)
            count = worthwhile([one.score for one in full], gain)
            if count < width:
                break
        same(kept, [(one.tokens, one.score) for one in full[:count]])


def test_auto_spends_little_on_clear_cut_prompts_and_never_twice_a_full_search() -> None:
    def price(target: TabularTarget, max_width: int, gain: float) -> tuple[int, int]:
        auto, full = TeacherCost(), TeacherCost()
        auto_search(
            target,
            [[1]],
            max_width=max_width,
            mass_gain=gain,
            max_new_tokens=40,
            most_beams=16,
            cost=auto,
        )
        beam_search(target, [[1]], width=max_width, max_new_tokens=40, cost=full)
        return auto.tokens, full.tokens

    for max_width in (1, 3, 4, 9, 16, 17):
        auto, full = price(TabularTarget(8), max_width, 0.0)  # everything is kept
        assert full <= auto < 2 * full
    sure = TabularTarget(8)
    sure.table_CV[:, 5] += 20
    auto, full = price(sure, 16, 0.05)
    assert auto < full / 3


def test_auto_fills_its_forwards_with_as_many_beams_as_are_allowed() -> None:
    class Watched(TabularTarget):
        def forward(
            self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals
        ) -> TargetOutput:
            rows.append(tokens_BT.shape[0] * keep)
            return super().forward(tokens_BT, block, keep, signals)

    seen: dict[int, tuple[int, int]] = {}
    for most_beams in (8, 32):
        rows: list[int] = []
        auto_search(
            Watched(8),
            [[n] for n in range(1, 7)],
            max_width=8,
            mass_gain=0.0,
            max_new_tokens=5,
            most_beams=most_beams,
        )
        seen[most_beams] = (max(rows), len(rows))
    (narrow, often), (wide, seldom) = seen.values()
    assert narrow == 8 and 8 < wide <= 32 and seldom < often


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 0}, "width"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_k": 9}, "top_k 9"),
        ({"prompts": [[1], []]}, "Prompt 1"),
        ({"prompts": [list(range(8))]}, "context of 8"),
    ],
)
def test_a_search_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    target = TabularTarget(8, max_length=8)
    wanted = {"prompts": [[1]], "width": 2, "max_new_tokens": 3} | change
    prompts = wanted.pop("prompts")
    with pytest.raises(InputError, match=words):
        beam_search(target, prompts, **wanted)


def test_broken_logits_are_not_searched() -> None:
    target = TabularTarget(4)
    target.table_CV[:, 1] = math.nan
    with pytest.raises(BackendError, match="NaN"):
        beam_search(target, [[1]], width=2, max_new_tokens=3)


def test_no_prompt_gives_nothing() -> None:
    assert beam_search(TabularTarget(4), [], width=2, max_new_tokens=3) == []


def test_enumeration_itself_covers_everything() -> None:
    """The oracle of these tests: its probabilities sum to one."""
    target = TabularTarget(4, end_ids=frozenset({0}))
    texts = every_text(target, [1], 3)
    assert math.isclose(sum(math.exp(score) for _, score in texts), 1.0)
    assert len({tokens for tokens, _ in texts}) == len(texts) == 1 + 3 + 3 * 3 * 4
    assert all(a != b for a, b in itertools.combinations([score for _, score in texts], 2))
