"""Perplexity on documents, and margins of ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.tiny_models import TEXT, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from draftsmith.bench.pairs import perplexity, ratio, read_along
from draftsmith.errors import InputError
from draftsmith.targets.hf import HFTarget

DOCUMENTS = [TEXT, "the dog sat on the mat", "def subtract(left):\n    return left" * 3]


@pytest.fixture(scope="module")
def model() -> HFTarget:
    return HFTarget(tiny_model().double(), tiny_tokenizer(), name="tiny")


def begins_with_a_token(model: HFTarget) -> HFTarget:
    """The same weights; its tokenizer puts token 0 before a text."""
    tokenizer = tiny_tokenizer()
    begin = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    return HFTarget(tiny_model().double(), tokenizer, name="begins")


@torch.no_grad()
def nats(ids: list[int]) -> list[float]:
    """Score every token but the first, by one forward of the bare model per token."""
    bare = tiny_model().double().eval()
    out = []
    for place in range(1, len(ids)):
        logits = bare(torch.tensor([ids[:place]])).logits[0, -1]
        out.append(-float(torch.log_softmax(logits, -1)[ids[place]]))
    return out


@pytest.mark.parametrize("longest", [2048, 12])
@pytest.mark.parametrize("piece", [None, 1, 5, 11, 64])
@pytest.mark.every(3)
def test_it_is_that_of_the_model_fed_token_by_token(
    model: HFTarget, longest: int, piece: int | None
) -> None:
    found = perplexity(model, DOCUMENTS, longest=longest, piece=piece)
    cut = [tiny_tokenizer()(text)["input_ids"][:longest] for text in DOCUMENTS]
    each = [nats(ids) for ids in cut]
    by_hand = math.exp(sum(map(sum, each)) / sum(map(len, each)))
    assert found.value == pytest.approx(by_hand, rel=1e-9)
    assert found.tokens == sum(len(ids) - 1 for ids in cut)
    assert found.documents == len(DOCUMENTS)
    assert found.cut == (0 if longest == 2048 else 2)


def test_pieces_are_as_small_as_they_are_asked_to_be(model: HFTarget) -> None:
    cache = model.new_cache(1, 8)
    for _ in range(2):  # what an earlier text left in the cache is forgotten
        pieces = list(read_along(model, cache, [5, 6, 7, 8, 9], piece=2))
        assert [(first, len(logits)) for first, logits in pieces] == [(0, 2), (2, 2), (4, 1)]
        whole = torch.cat([logits for _, logits in pieces])
        bare = tiny_model().double()(torch.tensor([[5, 6, 7, 8, 9]])).logits[0]
        torch.testing.assert_close(whole, bare.detach())


def test_a_begin_token_is_read_and_not_predicted(model: HFTarget) -> None:
    text = "the cat sat"
    ids = tiny_tokenizer()(text)["input_ids"]
    found = perplexity(begins_with_a_token(model), [text])
    assert found.tokens == len(ids) == perplexity(model, [text]).tokens + 1
    assert found.loss == pytest.approx(sum(nats([0, *ids])) / len(ids))


def test_a_short_context_is_where_documents_end() -> None:
    short = HFTarget(tiny_model(context=16).double(), tiny_tokenizer())
    found = perplexity(short, [TEXT, "the cat"])
    assert (found.longest, found.cut) == (16, 1)
    ids = tiny_tokenizer()(TEXT)["input_ids"]
    assert found.unread == len(ids) - 16
    ids = ids[:16]
    alone = perplexity(short, [TEXT])
    assert alone.loss == pytest.approx(sum(nats(ids)) / 15)


def test_documents_of_one_token_say_nothing(model: HFTarget) -> None:
    with_some = perplexity(model, ["t", *DOCUMENTS, ""])
    assert with_some == perplexity(model, DOCUMENTS)
    with pytest.raises(InputError, match=r"tiny.*two tokens"):
        perplexity(model, ["t", ""])


def test_tokens_weigh_the_same_whatever_document_they_are_in(model: HFTarget) -> None:
    long, short = DOCUMENTS[0], DOCUMENTS[1]
    one, other, both = (perplexity(model, texts) for texts in ([long], [short], [long, short]))
    assert one.moe is None and both.moe is not None
    sums = one.loss * one.tokens + other.loss * other.tokens
    assert both.loss == pytest.approx(sums / (one.tokens + other.tokens))


def test_a_tokenizer_of_another_model_is_refused(model: HFTarget) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["zebra"])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    other = HFTarget(tiny_model().double(), tokenizer, name="other")
    with pytest.raises(InputError, match=r"token \d+.*vocabulary of 300\b"):
        perplexity(other, ["a zebra sat"])


def test_the_margin_covers_the_truth_as_often_as_it_says() -> None:
    """Documents of very different lengths, each with a level of its own: 1,000 texts of 60."""
    rng = np.random.default_rng(0)
    hit = 0
    for _ in range(1000):
        numbers = rng.integers(1, 400, size=60)
        levels = 2.0 + rng.normal(scale=0.3, size=60)
        sums = levels * numbers + rng.normal(size=60) * np.sqrt(numbers)
        found = ratio(list(zip(sums.tolist(), numbers.tolist(), strict=True)))
        assert found.moe is not None
        hit += abs(found.value - 2.0) <= found.moe
    assert 0.92 <= hit / 1000 <= 0.97


def test_the_margin_of_a_ratio_follows_its_unit_and_needs_two_parts() -> None:
    parts = [(3.0, 10.0), (4.0, 11.0), (1.0, 5.0)]
    one, scaled = ratio(parts), ratio([(7 * amount, number) for amount, number in parts])
    assert one.moe is not None
    assert scaled.value == pytest.approx(7 * one.value)
    assert scaled.moe == pytest.approx(7 * one.moe)
    assert ratio([*parts, (0.0, 0.0)]) == one
    assert ratio(parts[:1]).moe is None
    same = ratio([(2.0, 4.0), (5.0, 10.0), (0.5, 1.0)])
    assert (same.value, same.moe) == (0.5, 0.0)
