"""Expected acceptance: against laws enumerated by hand, a plain forward, and real decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.core.cache import Block, KVCache
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.law import Law
from draftsmith.core.sampling import Sampler
from draftsmith.core.speedup import tokens_per_step
from draftsmith.core.types import Signals, TargetOutput, TreeShape
from draftsmith.distill import acceptance
from draftsmith.distill.acceptance import (
    AcceptanceReport,
    expected_acceptance,
    measure_acceptance,
    overlap,
)
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import InputError
from draftsmith.targets.base import Target
from draftsmith.targets.toy import TabularTarget, tiny_target

V = 6


def text(
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    prompt_id: str = "p",
    language: str | None = None,
    tag: str | None = None,
) -> Trajectory:
    return Trajectory(
        prompt_id=prompt_id,
        forcing="sample",
        prompt=tuple(prompt),
        tokens=tuple(tokens),
        score=0.0,
        language=language,
        tag=tag,
    )


def ragged(vocab: int, seed: int = 0) -> list[Trajectory]:
    """Prompts and continuations of unequal lengths, not in the order of any of them."""
    rng = np.random.default_rng(seed)
    sizes = [(5, 3), (1, 1), (9, 17), (2, 30), (12, 2), (1, 11)]
    return [
        text(rng.integers(0, vocab, a), rng.integers(0, vocab, b), prompt_id=f"p{i}")
        for i, (a, b) in enumerate(sizes)
    ]


def nucleus(logits: Tensor, temperature: float, top_p: float) -> list[float]:
    """A law from its definition, in plain Python."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    probs = [w / sum(weights) for w in weights]
    kept, mass = set(), 0.0
    for v in sorted(range(len(probs)), key=lambda v: -probs[v]):
        if mass >= top_p:
            break
        kept.add(v)
        mass += probs[v]
    return [p / mass if v in kept else 0.0 for v, p in enumerate(probs)]


def by_hand(
    target: TabularTarget, draft: TabularTarget, one: Trajectory, temperature: float, top_p: float
) -> list[float]:
    out = []
    for i in range(len(one.tokens)):
        known = [*one.prompt, *one.tokens[:i]]
        p_logits, q_logits = target.logits_after(known), draft.logits_after(known)
        if temperature == 0:
            out.append(float(p_logits.argmax() == q_logits.argmax()))
            continue
        p, q = (nucleus(logits, temperature, top_p) for logits in (p_logits, q_logits))
        out.append(sum(map(min, p, q)))
    return out


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.7, 0.4), (0.0, 1.0)]
)
def test_acceptance_is_the_overlap_of_the_laws_at_every_token(
    temperature: float, top_p: float, batch_size: int
) -> None:
    target, draft = TabularTarget(V, seed=0), TabularTarget(V, seed=1)
    sampler = Sampler(temperature=temperature, top_p=top_p)
    texts = ragged(V)
    betas = expected_acceptance(target, draft, texts, sampler, batch_size=batch_size)
    for one, found in zip(texts, betas, strict=True):
        np.testing.assert_allclose(
            found, by_hand(target, draft, one, temperature, top_p), atol=1e-12
        )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_tiny_transformer_is_measured_as_a_plain_forward_has_it(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "MAX_LOGITS", 4 * 64 * 5)
    target, draft = tiny_target(64, seed=0), tiny_target(64, seed=1, layers=1)
    texts = ragged(64)
    sampler = Sampler(temperature=temperature)
    found = expected_acceptance(target, draft, texts, sampler)
    for one, betas in zip(texts, found, strict=True):
        laws = []
        for model in (target, draft):
            with model.native("eager") as bare, torch.inference_mode():
                ids = torch.tensor([[*one.prompt, *one.tokens]])
                logits = bare(input_ids=ids, use_cache=False).logits[0].double()
            laws.append(logits[len(one.prompt) - 1 : -1])
        if temperature == 0:
            wanted = (laws[0].argmax(-1) == laws[1].argmax(-1)).double()
        else:
            p, q = ((logits / temperature).softmax(-1) for logits in laws)
            wanted = 1 - 0.5 * (p - q).abs().sum(-1)
        # eager attention takes its softmax in float32
        np.testing.assert_allclose(betas, wanted.numpy(), atol=1e-5)
    assert 0 < np.concatenate(found).mean() < 1


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    target = tiny_target(64)
    for temperature in (0.0, 1.0):
        sampler = Sampler(temperature=temperature, top_p=0.9)
        report = measure_acceptance(target, tiny_target(64), ragged(64), sampler)
        assert report.alpha == pytest.approx(1.0, abs=1e-12)
        assert report.alpha <= 1.0


def test_pieces_and_batches_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_target(64), tiny_target(64, seed=1)
    whole = expected_acceptance(target, draft, ragged(64))
    monkeypatch.setattr(acceptance, "CHUNK", 3)  # prompts in pieces too
    for batch_size, columns in ((1, 1), (2, 4), (6, 7)):
        monkeypatch.setattr(acceptance, "MAX_LOGITS", batch_size * columns * 64)
        pieces = expected_acceptance(target, draft, ragged(64), batch_size=batch_size)
        for left, right in zip(whole, pieces, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-9)


class Spy:
    """A model that notes how many logits it was asked for at once."""

    def __init__(self, model: Target) -> None:
        self.inner = model
        self.name, self.tokenizer = model.name, model.tokenizer
        self.vocab_size, self.end_ids = model.vocab_size, model.end_ids
        self.max_length, self.device, self.dtype = model.max_length, model.device, model.dtype
        self.asked: list[int] = []
        self.widths: list[int] = []

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self.inner.new_cache(num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        self.asked.append(tokens_BT.shape[0] * keep * self.vocab_size)
        self.widths.append(tokens_BT.shape[1])
        return self.inner.forward(tokens_BT, block, keep, signals)


def test_long_prompts_are_fed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "CHUNK", 4)
    target, draft = Spy(tiny_target(64)), Spy(tiny_target(64, seed=1))
    expected_acceptance(target, draft, ragged(64))
    assert max(target.widths) == max(draft.widths) == 4


def test_no_more_logits_exist_at_once_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = Spy(tiny_target(64)), Spy(tiny_target(64, seed=1))
    most = 64 * 3 * 4
    monkeypatch.setattr(acceptance, "MAX_LOGITS", most)
    expected_acceptance(target, draft, ragged(64), batch_size=3)
    for spy in (target, draft):
        assert max(spy.asked) == most
    whole = sum(len(one.tokens) for one in ragged(64)) * 64
    assert whole > 4 * most


def test_penalties_see_the_tokens_before_each_place() -> None:
    target, draft = TabularTarget(V, seed=0), TabularTarget(V, seed=1)
    sampler = Sampler(temperature=0.8, presence_penalty=0.7, repetition_penalty=1.3)
    one = text([1, 2], [3, 1, 1, 4])
    (found,) = expected_acceptance(target, draft, [one], sampler)
    for i, beta in enumerate(found):
        known = [*one.prompt, *one.tokens[:i]]
        history = [acceptance.History(tokens=known, num_prompt=2)]
        p, q = (sampler.law(m.logits_after(known)[None], history) for m in (target, draft))
        assert beta == pytest.approx(float(torch.minimum(p.probs(), q.probs()).sum()), abs=1e-12)
    plain = Sampler(temperature=0.8)
    (other,) = expected_acceptance(target, draft, [one], plain)
    assert np.abs(found - other).max() > 1e-3


def test_overlap_of_sparse_and_dense_laws_is_that_of_the_dense_ones() -> None:
    logits = torch.randn(40, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    samplers = [Sampler(temperature=1.0), Sampler(temperature=1.0, top_p=0.6), Sampler()]
    for one in samplers:
        for other in samplers:
            p, q = one.law(logits[:20]), other.law(logits[20:])
            wanted = torch.minimum(p.probs(), q.probs()).sum(-1).double()
            torch.testing.assert_close(overlap(p, q), wanted)
            torch.testing.assert_close(overlap(q, p), wanted)


def test_rounding_makes_no_acceptance_above_one() -> None:
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(0))
    law = Sampler(temperature=1.0).law(logits)
    assert float(law.probs().double().sum(-1).max()) > 1.0
    assert float(overlap(law, law).max()) == 1.0


# --------------------------------------------------------------------------- real decoding


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_decoding_accepts_as_often_as_expected(top_p: float) -> None:
    """Offers are Bernoulli trials with the betas of their places: what is accepted minus what is
    expected is a martingale, so 4.9 standard deviations fail by chance once in a million."""
    target, draft = TabularTarget(8, seed=0), TabularTarget(8, seed=1, scale=1.0)
    sampler = Sampler(temperature=1.0, top_p=top_p)
    drafter = Independent(Independent.Config(), model=draft)
    drafter.bind(target)
    options = DecodeOptions(
        sampler=sampler, max_new_tokens=200, rule="rejection", shape=TreeShape.chain(1), seed=3
    )
    prompts = [(i % 8, (3 * i) % 8) for i in range(16)]
    made: list[list[int]] = [[] for _ in prompts]
    trials: list[list[tuple[int, int]]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, options):
        for b, new in enumerate(step.emitted):
            if step.active[b] and step.offered_depth[b]:
                trials[b].append((len(made[b]), step.accepted[b]))
            made[b].extend(new)
    texts = [text(prompt, tokens) for prompt, tokens in zip(prompts, made, strict=True)]
    betas = expected_acceptance(target, draft, texts, sampler)
    expected = np.concatenate([b[[at for at, _ in t]] for b, t in zip(betas, trials, strict=True)])
    accepted = np.array([took for t in trials for _, took in t])
    assert len(accepted) > 1500
    spread = np.sqrt((expected * (1 - expected)).sum())
    assert abs(accepted.sum() - expected.sum()) < 4.9 * spread
    # and the trial is a sharp one: betas at other places would be caught
    shifted = np.concatenate(
        [b[[max(at - 1, 0) for at, _ in t]] for b, t in zip(betas, trials, strict=True)]
    )
    residual, moved = accepted - expected, accepted - shifted
    assert (residual**2).sum() < (moved**2).sum()


# --------------------------------------------------------------------------- vocabularies


@pytest.mark.parametrize("draft_size", [48, 80])
def test_a_padded_vocabulary_counts_on_the_common_part(draft_size: int) -> None:
    target, draft = tiny_target(64), tiny_target(draft_size, seed=1)
    texts = ragged(64)
    found = expected_acceptance(target, draft, texts)
    for one, betas in zip(texts, found, strict=True):
        fed = torch.tensor([[*one.prompt, *one.tokens[:-1]]])
        begin, common = len(one.prompt) - 1, min(64, draft_size)
        with target.native("eager") as bare, torch.inference_mode():
            p = bare(input_ids=fed, use_cache=False).logits[0, begin:].softmax(-1)
        with draft.native("eager") as bare, torch.inference_mode():
            logits = bare(input_ids=fed.clamp(max=common - 1), use_cache=False).logits[0, begin:]
        q = logits[:, :common].softmax(-1)
        wanted = torch.minimum(p[:, :common], q).sum(-1)
        np.testing.assert_allclose(betas, wanted.numpy(), atol=1e-5)


def test_a_subset_vocabulary_is_read_as_the_drafter_reads_it(tmp_path) -> None:
    d2t = [5, 0, 3, 2]
    save_file(
        {"d2t": torch.tensor(d2t), "unknown": torch.tensor([1])},
        tmp_path / "draft_vocab.safetensors",
    )
    target, draft = TabularTarget(V, seed=0), TabularTarget(len(d2t), seed=1)
    one = text([5, 4], [3, 0, 1, 2])
    subset = VocabularySubset.beside(str(tmp_path))
    assert subset is not None
    ids = subset.vocabularies(len(d2t), V)
    (found,) = expected_acceptance(target, draft, [one], vocabularies=ids)
    read = {t: d for d, t in enumerate(d2t)}
    for i, beta in enumerate(found):
        known = [*one.prompt, *one.tokens[:i]]
        p = target.logits_after(known).softmax(-1)
        q = draft.logits_after([read.get(t, 1) for t in known]).softmax(-1)
        wanted = sum(min(float(p[t]), float(q[d])) for d, t in enumerate(d2t))
        assert beta == pytest.approx(wanted, abs=1e-12)


def test_another_tokenizer_is_refused() -> None:
    target, draft = Spy(tiny_target(64)), Spy(tiny_target(64, seed=1))
    target.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    draft.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 1, "b": 0})
    with pytest.raises(InputError, match="different tokenizers"):
        measure_acceptance(target, draft, ragged(64))


# --------------------------------------------------------------------------- the report


def constant(alpha: float) -> tuple[TabularTarget, TabularTarget]:
    """Two laws over two tokens whose overlap is alpha everywhere."""
    target, draft = TabularTarget(2), TabularTarget(2)
    target.table_CV = torch.tensor([1.0, 1e-300], dtype=torch.float64).log().expand(9, 2)
    draft.table_CV = torch.tensor([alpha, 1 - alpha], dtype=torch.float64).log().expand(9, 2)
    return target, draft


def by_first_token(alphas: dict[int, float]) -> tuple[TabularTarget, TabularTarget]:
    """Overlap alphas[t] behind a token t, so that a text chooses its own betas."""
    size = max(alphas) + 1
    target, draft = TabularTarget(size, order=1), TabularTarget(size, order=1)
    p = torch.full((size + 1, size), 1e-300, dtype=torch.float64)
    p[:, 0] = 1.0
    q = p.clone()
    for token, alpha in alphas.items():
        q[token + 1, 0], q[token + 1, 1] = alpha, 1 - alpha
    target.table_CV, draft.table_CV = p.log(), q.log()
    return target, draft


def two_prompts() -> AcceptanceReport:
    """Betas: prompt a [.8 .8 .2] and [.8]; prompt b [.5 .5 .5 .5 .5]."""
    target, draft = by_first_token({0: 0.8, 1: 0.2, 2: 0.5})
    texts = [
        text([0], [0, 1, 0], prompt_id="a", language="French", tag="x"),
        text([2], [2, 2, 2, 2, 1], prompt_id="b", language="Korean", tag="x"),
        text([0], [2], prompt_id="a", language="French"),
    ]
    return measure_acceptance(target, draft, texts)


def test_each_alpha_weighs_as_its_name_says() -> None:
    report = two_prompts()
    assert report.tokens == 9
    assert report.prompts == 2
    assert report.alpha == pytest.approx((1.8 + 0.8 + 2.5) / 9)
    a_sequence = (1.8 + 0.8) / (3 + 1)  # E[sum of betas] / E[length]
    a_prompt = (1.8 / 3 + 0.8) / 2  # E[sum of betas / length]
    assert report.alpha_sequence == pytest.approx((a_sequence + 0.5) / 2)
    assert report.alpha_per_prompt == pytest.approx((a_prompt + 0.5) / 2)


def test_languages_and_tags_are_sums_of_their_own_tokens() -> None:
    report = two_prompts()
    assert report.by_language == pytest.approx({"French": 0.65, "Korean": 0.5})
    assert list(report.by_language) == ["French", "Korean"]
    assert report.by_tag == pytest.approx({"x": 4.3 / 8})


def test_predictions_are_the_closed_formulas() -> None:
    report = two_prompts()
    for gamma in (2, 4):
        found = report.results(gamma, 0.1)
        tau = found["tau_predicted"]
        assert tau == pytest.approx(sum(report.alpha**j for j in range(gamma + 1)))
        assert found["speedup_predicted"] == pytest.approx(tau / (0.1 * gamma + 1))
    silent = measure_acceptance(*constant(0.3), [text([0], [0])])
    assert silent.results(3)["speedup_predicted"] is None
    assert silent.alpha == pytest.approx(0.3)


def test_results_are_those_of_one_draft_length() -> None:
    report = two_prompts()
    found = report.results(4)
    assert found["by_language"]["Korean"]["alpha"] == pytest.approx(0.5)
    of_x = found["by_tag"]["x"]
    assert of_x["alpha"] == pytest.approx((1.8 + 2.5) / 8)
    assert of_x["tau_predicted"] == pytest.approx(float(tokens_per_step(of_x["alpha"], 4)))
    silent = report.results(None)
    assert silent["alpha"] == found["alpha"]
    assert silent["tau_predicted"] is silent["by_language"]["Korean"]["tau_predicted"] is None


def test_continuations_without_tokens_are_left_out() -> None:
    target, draft = TabularTarget(V), TabularTarget(V, seed=1)
    texts = [text([1], [], prompt_id="none"), text([1], [2, 3])]
    report = measure_acceptance(target, draft, texts)
    assert (report.prompts, report.tokens) == (1, 2)
    with pytest.raises(InputError, match="no continuation"):
        measure_acceptance(target, draft, texts[:1])


@pytest.mark.parametrize(
    ("one", "named"),
    [
        (text([], [1], prompt_id="odd"), "Prompt odd is empty"),
        (text([1] * 6, [1] * 4, prompt_id="odd"), "Prompt odd has 9 tokens .* context of 8"),
        (text([1], [V], prompt_id="odd"), "Prompt odd holds token 6"),
    ],
)
def test_a_text_that_does_not_fit_is_named(one: Trajectory, named: str) -> None:
    target, draft = TabularTarget(V), TabularTarget(V, seed=1, max_length=8)
    assert expected_acceptance(target, draft, [text([1] * 6, [1] * 3)])[0].shape == (3,)
    with pytest.raises(InputError, match=named):
        expected_acceptance(target, draft, [text([1], [2]), one])


def test_the_law_of_a_point_mass_overlaps_with_itself_only() -> None:
    left, right = (Law.point(torch.tensor(tokens), 4) for tokens in ([1, 2, 3], [1, 0, 3]))
    assert overlap(left, right).tolist() == [1.0, 0.0, 1.0]
