"""Draft models: vocabularies that differ, trees, contexts that end, sessions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.llama2c import babyllama, weights_folder
from tests.tiny_models import tiny_tokenizer

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.generation import Generation, generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import TreeShape
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.tree_growth import drawing
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import BackendError, InputError
from draftsmith.targets.hf import HFTarget, load_target, load_tokenizer
from draftsmith.targets.toy import TabularTarget, tiny_target

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
SHAPES = {"chain": TreeShape.chain(4), "tree": TreeShape(widths=(3, 2, 1))}


def texts(
    target: HFTarget | TabularTarget,
    drafter: Independent | NoDrafter,
    *,
    prompts: list[list[int]] = PROMPTS,
    temperature: float = 0.0,
    batch_size: int = 1,
    shape: TreeShape | None = None,
    rule: str = "auto",
    tokens: int = 24,
    top_k: int = 0,
) -> list[Generation]:
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(temperature=temperature, top_k=top_k),
        max_new_tokens=tokens,
        shape=shape,
        rule=rule,
    )
    return generate(target, drafter, prompts, options, batch_size=batch_size)


def ids(made: list[Generation]) -> list[tuple[int, ...]]:
    return [one.token_ids for one in made]


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_draft_model_equal_to_the_target_is_always_accepted(
    proposal: str, shape: TreeShape
) -> None:
    config = Independent.Config(proposal=proposal)
    drafter = Independent(config, model=tiny_target(64))
    for one in texts(tiny_target(64), drafter, temperature=0.9, shape=shape):
        assert one.metrics.acceptance_rate == 1.0


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_draws_that_are_cooled_as_much_as_the_draft_model_is_too_flat_are_always_accepted(
    proposal: Any, shape: TreeShape
) -> None:
    """Half of the target's logits at half of the temperature are its own law."""

    def accepted(draft_temperature: float) -> set[float]:
        flat = tiny_target(64)
        with torch.no_grad():
            flat.model.lm_head.weight.mul_(0.5)
        config = Independent.Config(proposal=proposal, draft_temperature=draft_temperature)
        made = texts(tiny_target(64), Independent(config, model=flat), temperature=0.9, shape=shape)
        return {one.metrics.acceptance_rate for one in made}

    assert accepted(0.5) == {1.0} != accepted(1.0)


@pytest.mark.parametrize("draft_temperature", [0.0, 0.05, 11.0, math.nan])
def test_draft_temperatures_that_leave_no_law_are_refused(draft_temperature: float) -> None:
    for config in (Independent.Config, Eagle.Config):
        with pytest.raises(InputError, match="draft_temperature must be at"):
            config(draft_temperature=draft_temperature)


def test_the_coldest_draws_of_the_coldest_text_still_have_a_law() -> None:
    coldest = Sampler(temperature=1e-30)
    assert drawing(coldest, 0.1).temperature == pytest.approx(1e-30)
    assert drawing(Sampler(temperature=0.0), 0.5) == Sampler(temperature=0.0)
    assert drawing(Sampler(temperature=0.8, top_p=0.9), 0.5) == Sampler(temperature=0.4, top_p=0.9)


@pytest.mark.parametrize("proposal", ["sampled", "without_replacement", "greedy"])
def test_trees_rank_by_what_penalties_make_of_the_logits(proposal: str) -> None:
    """The target as its own draft: the best child is what it says, so all of its path is right."""
    target = tiny_target(64)
    drafter = Independent(Independent.Config(proposal=proposal), model=tiny_target(64))
    drafter.bind(target)
    options = DecodeOptions(
        sampler=Sampler(repetition_penalty=1.7, presence_penalty=0.5),
        max_new_tokens=24,
        shape=TreeShape(widths=(2, 1, 1)),
    )
    for one in generate(target, drafter, PROMPTS, options):
        assert one.metrics.tokens_per_step > 3.4


@pytest.mark.parametrize("draft_size", [48, 80])
def test_vocabularies_padded_differently_draft_on_the_common_part(draft_size: int) -> None:
    target = tiny_target(64)
    drafter = Independent(Independent.Config(), model=tiny_target(draft_size, seed=1))
    assert ids(texts(target, drafter, batch_size=3)) == ids(texts(target, NoDrafter()))
    sampled = texts(target, drafter, temperature=1.0, tokens=60, batch_size=3)
    assert any(one.metrics.accepted for one in sampled)
    assert max(max(one.token_ids) for one in sampled) < 64
    # top-k on a law that has no mass on the padding: ties at -inf must not confuse it
    assert texts(target, drafter, temperature=1.0, top_k=60, batch_size=3)


def subset_drafter(folder: Path, d2t: list[int], vocab: int) -> Independent:
    tensors = {"d2t": torch.tensor(d2t), "unknown": torch.tensor([0])}
    save_file(tensors, folder / "draft_vocab.safetensors")
    config = Independent.Config(source=str(folder))
    return Independent(config, model=tiny_target(vocab, seed=1))


def test_a_vocabulary_subset_proposes_only_its_own_tokens(tmp_path: Path) -> None:
    target, kept = tiny_target(64), list(range(0, 64, 2))
    drafter = subset_drafter(tmp_path, kept, 32)
    assert ids(texts(target, drafter, batch_size=3)) == ids(texts(target, NoDrafter()))
    drafter.bind(target)
    proposed: set[int] = set()
    accepted = 0
    sampler = Sampler(temperature=1.5)
    options = DecodeOptions(sampler=sampler, max_new_tokens=60)
    for step in decode(target, drafter, PROMPTS, options):
        accepted += sum(step.accepted)
        for row, count in zip(step.emitted, step.accepted, strict=True):
            proposed.update(row[:count])
    assert accepted > 0
    assert proposed <= set(kept)


@pytest.mark.parametrize(
    ("d2t", "size", "said"),
    [
        (range(100, 132), 32, "names token 131, but the target has 64 tokens: it was made for"),
        (range(30), 32, "names 30 tokens, but the draft model beside it has 32: it is of another"),
        (range(100, 130), 32, "names 30 tokens, but the draft model beside it has 32"),
    ],
)
def test_a_subset_of_another_model_says_which_of_the_two_it_is(
    tmp_path: Path, d2t: range, size: int, said: str
) -> None:
    drafter = subset_drafter(tmp_path, list(d2t), size)
    with pytest.raises(BackendError, match=said) as error:
        drafter.bind(tiny_target(64))
    assert str(tmp_path / "draft_vocab.safetensors") in str(error.value)


class Tokens:
    """A tokenizer of which only the tokens are asked for."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: i for i, token in enumerate(tokens)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


ODD = VocabularySubset(torch.tensor([1, 3, 5]), 0)


@pytest.mark.parametrize(
    ("tokens", "same"),
    [
        ("abcdef", True),
        ("abcdefgh", True),  # added at the end
        ("xbydzf", True),  # others are read as `unknown`, whatever they are
        ("abcfed", False),
        ("abcde", False),
    ],
)
def test_a_subset_is_of_the_tokens_that_it_names(tmp_path: Path, tokens: str, same: bool) -> None:
    ODD.save(tmp_path, Tokens(*"abcdef"))
    found = VocabularySubset.beside(str(tmp_path))
    assert found is not None and torch.equal(found.d2t, ODD.d2t) and found.unknown == ODD.unknown
    found.check_tokens(None)  # token ids alone: the caller says that they are the same
    if same:
        return found.check_tokens(Tokens(*tokens))
    with pytest.raises(BackendError, match=r"draft_vocab\.safetensors names tokens of another"):
        found.check_tokens(Tokens(*tokens))


@pytest.mark.parametrize("kept", ["digest", "tokenizer beside it", "neither", "settings alone"])
def test_a_drafter_of_a_target_with_as_many_other_tokens_is_refused(
    tmp_path: Path, kept: str
) -> None:
    """Files of earlier versions have no digest: the tokenizer beside them tells, if it can be
    read."""
    target, other = tiny_target(300), tiny_target(300, seed=2)
    target.tokenizer, other.tokenizer = tiny_tokenizer(), tiny_tokenizer()
    other.tokenizer.get_vocab = lambda: {
        token: 299 - i for token, i in target.tokenizer.get_vocab().items()
    }
    drafter = subset_drafter(tmp_path, list(range(32)), 32)
    if kept == "digest":
        found = VocabularySubset.beside(str(tmp_path))
        assert found is not None and found.tokens_sha256 is None
        found.save(tmp_path, target.tokenizer)
    if kept in ("tokenizer beside it", "settings alone"):
        target.tokenizer.save_pretrained(tmp_path)
        target.config.save_pretrained(tmp_path)
    if kept == "settings alone":
        (tmp_path / "tokenizer.json").unlink()
    drafter.bind(target)
    if kept in ("neither", "settings alone"):
        return drafter.bind(other)
    with pytest.raises(BackendError, match="names tokens of another target") as error:
        drafter.bind(other)
    assert "draftsmith pretrain --tokenizer TARGET --vocab-subset" in str(error.value)


def test_a_subset_of_mini_code_is_refused_for_mini_ende(tmp_path: Path) -> None:
    """All of its ids exist there, and a good part of them, the bytes, are the same tokens."""
    code, ende = (load_tokenizer(f"models/{name}/target") for name in ("mini-code", "mini-ende"))
    made = VocabularySubset(torch.arange(0, min(len(code), len(ende)), 4), 0)
    made.save(tmp_path, code)
    found = VocabularySubset.beside(str(tmp_path))
    assert found is not None
    found.check_tokens(code)
    with pytest.raises(BackendError, match="names tokens of another target"):
        found.check_tokens(ende)


def test_a_damaged_subset_is_named(tmp_path: Path) -> None:
    drafter = subset_drafter(tmp_path, list(range(32)), 32)
    file = tmp_path / "draft_vocab.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(BackendError, match=r"draft_vocab\.safetensors"):
        drafter.bind(tiny_target(64))


@pytest.mark.parametrize(
    ("d2t", "unknown", "said"),
    [
        ([0, 1, 2, 2], [0], "twice"),
        ([True, False], [0], "no vocabulary"),
        ([0.0, 1.0], [0], "no vocabulary"),
        ([[0, 1]], [0], "no vocabulary"),
        ([], [0], "no vocabulary"),
        ([0, 1], [0, 1], "no vocabulary"),
        ([0, 1], [0.5], "no vocabulary"),
        ([0, -1], [0], "ids that no token has"),
        ([0, 1], [2], "ids that no token has"),
    ],
)
def test_a_subset_that_is_no_list_of_tokens_is_refused(
    tmp_path: Path, d2t: list[object], unknown: list[object], said: str
) -> None:
    """A token that stands there twice would be drafted by another law than verification is told."""
    drafter = subset_drafter(tmp_path, [0, 1], 2)
    tensors = {"d2t": torch.tensor(d2t), "unknown": torch.tensor(unknown)}
    save_file(tensors, tmp_path / "draft_vocab.safetensors")
    with pytest.raises(BackendError, match=rf"draft_vocab\.safetensors .*{said}"):
        drafter.bind(tiny_target(64))


def test_text_that_outgrows_the_draft_models_context_goes_on_without_drafts() -> None:
    target = tiny_target(64)
    drafter = Independent(Independent.Config(), model=tiny_target(64, max_length=16))
    made = texts(target, drafter, tokens=40, batch_size=3)
    assert ids(made) == ids(texts(target, NoDrafter(), tokens=40))
    assert all(0 < one.metrics.accepted < 16 for one in made)


def test_a_session_reuses_the_common_beginning_and_changes_nothing() -> None:
    target = tiny_target(64)
    drafter = Independent(Independent.Config(), model=tiny_target(64))
    drafter.bind(target)
    session = Session()
    options = DecodeOptions(max_new_tokens=12)
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 9, 9], [1, 2, 3, 9, 9, 9, 1], [5]):
        fed = []
        out: list[int] = []
        for step in decode(target, drafter, [prompt], options, session=session):
            out += step.emitted[0]
            fed.append(len(out))
        assert tuple(out) == ids(texts(target, NoDrafter(), prompts=[prompt], tokens=12))[0]
        assert session.tokens is not None
        assert session.tokens[0] == [*prompt, *out][:-1]


def test_a_draft_model_without_a_folder_is_refused_with_the_way_out() -> None:
    with pytest.raises(InputError, match=r"independent:PATH_OR_HUB_ID"):
        load_drafter("independent")


# ------------------------------------------------------------ really trained pairs


def pair_prompts(target: HFTarget) -> list[list[int]]:
    starts = ("Once upon a time", "The dog was", "One day, a boy named Tim")
    return [target.tokenizer(text)["input_ids"] for text in starts]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.every(2)
def test_the_same_tokenizer_pair_drafts_well(temperature: float) -> None:
    folder = weights_folder() / "hf"
    target = load_target(str(folder / "stories260K"), dtype="float64")
    drafter = load_drafter(f"independent:{folder / 'llama2xs-281K'}")
    assert isinstance(drafter, Independent)
    prompts = pair_prompts(target)
    made = texts(target, drafter, prompts=prompts, temperature=temperature, tokens=80)
    rate = sum(m.metrics.accepted for m in made) / sum(m.metrics.offered for m in made)
    assert rate > 0.25, "this pair's expected acceptance per token is about 0.65"
    if temperature == 0:
        assert ids(made) == ids(texts(target, NoDrafter(), prompts=prompts, tokens=80))


@pytest.mark.parametrize(("temperature", "batch_size"), [(0.0, 3), (0.8, 1), (0.0, 1), (0.8, 3)])
@pytest.mark.every(4)
def test_a_draft_model_with_another_tokenizer_drafts_through_text(
    temperature: float, batch_size: int
) -> None:
    """512 pieces against 105 characters, both ways. Match keeps even the sampled text the same."""
    stories = load_target(str(weights_folder() / "hf" / "stories260K"), dtype="float64")
    letters = babyllama(torch.float64)
    for target, draft in ((stories, letters), (letters, stories)):
        prompts = pair_prompts(target)
        drafter = Independent(Independent.Config(), model=draft)
        made = texts(
            target,
            drafter,
            prompts=prompts,
            temperature=temperature,
            batch_size=batch_size,
            tokens=60,
        )
        plain = texts(
            target, NoDrafter(), prompts=prompts, temperature=temperature, batch_size=3, tokens=60
        )
        assert ids(made) == ids(plain)
        steps = sum(one.metrics.steps for one in made)
        assert sum(len(one.token_ids) for one in made) > 1.3 * steps


@pytest.mark.parametrize("option", [{"confidence": 0.4}, {"draft_temperature": 0.8}], ids=str)
def test_what_means_nothing_for_drafts_through_text_is_refused(option: dict[str, float]) -> None:
    target = load_target(str(weights_folder() / "hf" / "stories260K"))
    drafter = Independent(Independent.Config(**option), model=babyllama(torch.float32))
    with pytest.raises(InputError, match=f"option {next(iter(option))}: .* another tokenizer"):
        drafter.bind(target)


def test_a_draft_through_text_depends_on_its_own_row() -> None:
    """Rows come to their ends at different steps: how the last words are cut into tokens is a
    matter of how many of them may be drafted."""
    target = load_target(str(weights_folder() / "hf" / "stories260K"), dtype="float64")
    draft = babyllama(torch.float64)
    drafter = Independent(Independent.Config(), model=draft)
    prompts = pair_prompts(target)
    together, alone = (
        texts(target, drafter, prompts=prompts, temperature=0.8, batch_size=size, tokens=24)
        for size in (len(prompts), 1)
    )
    assert ids(together) == ids(alone)
    assert [made.metrics for made in together] == [made.metrics for made in alone]


@pytest.mark.full
def test_long_texts_are_cut_anew_only_at_their_end() -> None:
    """What the draft model reads stays one text: decoding its reading gives the text back."""
    stories = load_target(str(weights_folder() / "hf" / "stories260K"), dtype="float32")
    letters = babyllama()
    drafter = Independent(Independent.Config(), model=letters)
    drafter.bind(stories)
    session = Session()
    prompt = stories.tokenizer("Once upon a time")["input_ids"]
    for _ in decode(stories, drafter, [prompt], DecodeOptions(max_new_tokens=480), session=session):
        pass
    reading = session.state.readings[0]
    assert len(reading.text) > 760
    again = letters.tokenizer.decode(reading.ids, skip_special_tokens=True)
    assert again.replace(" ", "") == reading.text.replace("\n", "").replace(" ", "")
