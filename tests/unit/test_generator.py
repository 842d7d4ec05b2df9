"""`Generator` and `SamplingParams`: the loop's tokens from texts, chats and token ids."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_models import CHAT, save_pair, tiny_model, tiny_tokenizer

from draftsmith import DecodeOptions, Generator, Sampler, SamplingParams, TreeShape, load_drafter
from draftsmith.core.decode import decode
from draftsmith.core.generation import generate
from draftsmith.core.lossy_rules import Typical
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import BackendError, InputError, LossyRule
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

TEXTS = ["def add(left, right):\n", "the cat sat on the mat, the cat", "return left"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget(tiny_model().double(), tiny_tokenizer(), name="tiny")


def ids_of(target: HFTarget, text: str) -> list[int]:
    return list(target.tokenizer.encode(text))


def looped(target: Any, drafter: Drafter, prompts: Any, options: DecodeOptions) -> list[list[int]]:
    """The tokens that `decode` itself emits, all prompts in one batch."""
    drafter.bind(target)
    out: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, options):
        for row, new in zip(out, step.emitted, strict=True):
            row.extend(new)
    return out


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_tokens_are_those_of_the_loop(
    target: HFTarget, drafter: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=12, seed=5)
    made = Generator(target, drafter).generate(TEXTS, params, batch_size=2)
    sampler = Sampler(temperature=temperature, top_p=0.9)
    options = DecodeOptions(sampler=sampler, max_new_tokens=12, seed=5)
    prompts = [ids_of(target, text) for text in TEXTS]
    assert [list(one.token_ids) for one in made] == looped(
        target, load_drafter(drafter), prompts, options
    )
    assert [list(one.prompt_tokens) for one in made] == prompts
    assert all(one.text == target.tokenizer.decode(one.token_ids) for one in made)


def test_every_parameter_reaches_the_loop(target: HFTarget) -> None:
    """A parameter that were dropped on the way would leave its default in the options."""
    params = SamplingParams(
        temperature=0.7,
        top_p=0.8,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias={5: -1.0},
        seed=11,
        stop="x",
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=9,
    )
    changed = [f for f in dataclasses.fields(params) if getattr(params, f.name) != f.default]
    assert {f.name for f in dataclasses.fields(params)} == {"n", *(f.name for f in changed)}
    assert Generator(target).decode_options(params) == DecodeOptions(
        sampler=Sampler(
            temperature=0.7,
            top_p=0.8,
            top_k=7,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            repetition_penalty=1.4,
            logit_bias=((5, -1.0),),
        ),
        seed=11,
        stop_strings=("x",),
        stop_token_ids=(3,),
        ignore_end=True,
        max_new_tokens=9,
    )


def test_defaults_are_those_of_vllm() -> None:
    """As its documentation lists them (0 and -1 both switch top-k off)."""
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "max_tokens": 16,
    }
    assert SamplingParams(top_k=-1) == SamplingParams()
    assert pickle.loads(pickle.dumps(SamplingParams(seed=3))) == SamplingParams(seed=3)


def test_one_prompt_needs_no_list(target: HFTarget) -> None:
    generator, ids = Generator(target), ids_of(target, TEXTS[0])
    chat = [{"role": "user", "content": TEXTS[0]}]
    for one, many in ((TEXTS[0], [TEXTS[0]]), (ids, [ids]), (chat, [chat])):
        assert generator.generate(one, GREEDY) == generator.generate(many, GREEDY)


@pytest.fixture
def chatty() -> HFTarget:
    """A target whose tokenizer has a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return HFTarget(tiny_model(), tokenizer)


def test_a_chat_goes_through_the_template(chatty: HFTarget) -> None:
    generator = Generator(chatty)
    chat = [{"role": "system", "content": "the log"}, {"role": "user", "content": "the cat"}]
    (made,) = generator.generate([chat], GREEDY)
    written = "<system> the log\n<user> the cat\n<assistant>"
    assert [made] == generator.generate([written], GREEDY, raw=True)


def test_a_text_is_a_turn_of_a_chat_unless_it_is_raw(chatty: HFTarget, target: HFTarget) -> None:
    generator, text = Generator(chatty), TEXTS[0]
    asked = generator.generate(text, GREEDY)
    assert asked == generator.generate([[{"role": "user", "content": text}]], GREEDY)
    assert asked[0].prompt_tokens == tuple(ids_of(chatty, f"<user> {text}\n<assistant>"))
    raw = generator.generate(text, GREEDY, raw=True)
    assert raw == generator.generate(ids_of(chatty, text), GREEDY)
    # without a template there is one way
    assert Generator(target).generate(text, GREEDY) == Generator(target).generate(
        text, GREEDY, raw=True
    )


def test_raw_is_for_texts(chatty: HFTarget) -> None:
    generator = Generator(chatty)
    with pytest.raises(InputError, match="Prompt 0 is a chat, which raw=True cannot"):
        generator.generate([[{"role": "user", "content": "the cat"}]], GREEDY, raw=True)
    with pytest.raises(InputError, match="Prompt 1 is empty"):
        generator.generate(["the cat", " \n"], GREEDY)
    with pytest.raises(InputError, match="raw must be"):
        generator.generate("the cat", GREEDY, raw="no")  # type: ignore[arg-type]


def test_a_seed_repeats_a_text_and_its_absence_does_not(target: HFTarget) -> None:
    generator = Generator(target, "prompt_lookup")
    fixed, free = SamplingParams(max_tokens=24, seed=1), SamplingParams(max_tokens=24)
    assert generator.generate(TEXTS, fixed) == generator.generate(TEXTS, fixed)
    other = dataclasses.replace(fixed, seed=2)
    assert generator.generate(TEXTS, fixed) != generator.generate(TEXTS, other)
    # 72 draws from laws that are far from certain: a coincidence is out of reach
    assert generator.generate(TEXTS, free) != generator.generate(TEXTS, free)


def test_n_continuations_stand_side_by_side(target: HFTarget) -> None:
    generator = Generator(target, "prompt_lookup")
    params = SamplingParams(n=3, max_tokens=16, seed=4)
    made = generator.generate(TEXTS[:2], params, batch_size=4)
    prompts = [ids_of(target, text) for text in TEXTS[:2] for _ in range(3)]
    assert [list(one.prompt_tokens) for one in made] == prompts
    assert len({one.token_ids for one in made[:3]}) == 3  # each has draws of its own
    options = DecodeOptions(sampler=Sampler(temperature=1.0), max_new_tokens=16, seed=4)
    assert [one.token_ids for one in made] == [
        one.token_ids for one in generate(target, PromptLookup(), prompts, options)
    ]


def test_stops_by_string_token_and_end(target: HFTarget) -> None:
    generator = Generator(target, "prompt_lookup")
    long = dataclasses.replace(GREEDY, max_tokens=30)
    (whole,) = generator.generate(TEXTS[0], long)
    assert whole.text is not None and whole.finish_reason == "length"
    text = whole.text[4:6]
    (cut,) = generator.generate(TEXTS[0], dataclasses.replace(long, stop=text))
    assert cut.text == whole.text[: whole.text.find(text)] and cut.finish_reason == "stop"
    token = whole.token_ids[7]
    (cut,) = generator.generate(TEXTS[0], dataclasses.replace(long, stop_token_ids=[token]))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert cut.finish_reason == "stop"
    # the target's own end token, made the most probable
    ends = dataclasses.replace(long, logit_bias={0: 100.0})
    (cut,) = generator.generate(TEXTS[0], ends)
    assert (cut.token_ids, cut.finish_reason) == ((0,), "stop")
    (past,) = generator.generate(TEXTS[0], dataclasses.replace(ends, ignore_eos=True))
    assert past.token_ids == (0,) * 30
    both = dataclasses.replace(ends, ignore_eos=True, stop_token_ids=(0,))
    assert generator.generate(TEXTS[0], both)[0].token_ids == (0,)


def test_without_max_tokens_a_text_fills_the_context() -> None:
    generator = Generator(tiny_target(64, max_length=40))
    (made,) = generator.generate([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(made.token_ids) == 37 and made.finish_reason == "context"
    with pytest.raises(InputError, match="max_tokens"):
        Generator(TabularTarget(8)).generate([1], SamplingParams(max_tokens=None))


def test_predictions_are_drafted(target: HFTarget) -> None:
    (plain,) = Generator(target).generate(TEXTS[0], GREEDY)
    generator = Generator(target, "prediction")
    assert plain.text is not None
    # as text it is less exact: a random model's bytes are rarely whole characters
    for expected, least in ((plain.token_ids, 6), (plain.text, 2)):
        (made,) = generator.generate(TEXTS[0], GREEDY, predictions=[expected])
        assert made.token_ids == plain.token_ids
        assert made.metrics.acceptance_length >= least
    with pytest.raises(InputError, match="predictions"):
        generator.generate(TEXTS, GREEDY, predictions=["one"])


def test_models_and_drafters_are_loaded_and_bound_by_name(tmp_path: Path) -> None:
    save_pair(tmp_path)
    generator = Generator(
        str(tmp_path / "target"),
        drafter=f"independent:{tmp_path / 'draft'}",
        drafter_options={"proposal": "greedy"},
        shape=TreeShape.chain(2),
        dtype="float64",
    )
    (made,) = generator.generate(TEXTS[0], GREEDY)
    assert generator.target.dtype == torch.float64
    assert generator.drafter.config.proposal == "greedy"
    assert 1 < made.metrics.acceptance_length <= 3
    (plain,) = Generator(str(tmp_path / "target"), dtype="float64").generate(TEXTS[0], GREEDY)
    assert made.token_ids == plain.token_ids


def test_a_lossy_rule_needs_leave(target: HFTarget) -> None:
    for rule in ("typical", Typical()):
        with pytest.raises(LossyRule):
            Generator(target, "prompt_lookup", rule=rule).generate(TEXTS[0])
        allowed = Generator(target, "prompt_lookup", rule=rule, allow_lossy=True)
        assert allowed.generate(TEXTS[0])[0].token_ids


def test_a_drafter_that_another_generator_had_is_bound_again(target: HFTarget) -> None:
    drafter = load_drafter("prediction")
    one = Generator(target, drafter)
    other = Generator(TabularTarget(8), drafter)
    tokens = ids_of(target, TEXTS[0])
    assert max(tokens) >= 8
    (made,) = one.generate(tokens, GREEDY, predictions=[tokens])
    assert made.token_ids == Generator(target).generate(tokens, GREEDY)[0].token_ids
    with pytest.raises(InputError, match="vocabulary of 8"):
        other.generate([1], GREEDY, predictions=[tokens])


def test_prompts_may_be_arrays_tensors_tuples_and_iterators(target: HFTarget) -> None:
    generator = Generator(target)
    ids = ids_of(target, TEXTS[0])
    expected = [one.token_ids for one in generator.generate([ids], GREEDY)]
    given: list[Any] = [np.array(ids), torch.tensor([ids]), list(np.array(ids)), (tuple(ids),)]
    for prompts in [*given, iter([ids])]:
        made = generator.generate(prompts, GREEDY)
        assert [one.token_ids for one in made] == expected
        assert all(type(token) is int for token in made[0].prompt_tokens)


def test_one_prediction_needs_no_list(target: HFTarget) -> None:
    generator = Generator(target, "prediction")
    (plain,) = generator.generate(TEXTS[0], GREEDY)
    assert plain.text
    listed, alone = (
        generator.generate(TEXTS[0], GREEDY, predictions=one)[0]
        for one in ([plain.text], plain.text)
    )
    assert alone == listed


Wrong = Callable[[HFTarget], object]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda t: SamplingParams(min_tokens=3), "min_tokens"),
        (lambda t: SamplingParams(max_token=3), "'max_tokens'"),
        (lambda t: SamplingParams(n=0), "n must"),
        (lambda t: SamplingParams(n=2, temperature=0.0), "n must"),
        (lambda t: SamplingParams(temperature=-1.0), "temperature"),
        (lambda t: SamplingParams(top_p=0.0), "top_p"),
        (lambda t: SamplingParams(top_k=-2), "top_k"),
        (lambda t: SamplingParams(min_p=2.0), "min_p"),
        (lambda t: SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (lambda t: SamplingParams(frequency_penalty=float("nan")), "frequency_penalty"),
        (lambda t: SamplingParams(logit_bias={1: float("inf")}), "logit_bias"),
        (lambda t: SamplingParams(seed=-1), "seed"),
        (lambda t: SamplingParams(max_tokens=0), "max_tokens"),
        (lambda t: SamplingParams(stop=["a", ""]), "stop"),
        (lambda t: SamplingParams(stop_token_ids=[-1]), "stop_token_ids"),
        (lambda t: SamplingParams(stop_token_ids=5), "stop_token_ids"),
        (lambda t: SamplingParams(stop=5), "stop must"),
        (lambda t: SamplingParams(stop=["a", 5]), "stop must"),
        (lambda t: SamplingParams(n="a"), "n must"),
        (lambda t: SamplingParams(max_tokens=2.5), "max_tokens"),
        (lambda t: SamplingParams(top_k=1.5), "top_k"),
        (lambda t: SamplingParams(seed=1.5), "seed"),
        (lambda t: SamplingParams(temperature=None), "temperature"),
        (lambda t: SamplingParams(top_p="0.9"), "top_p"),
        (lambda t: Generator(t, "prompt_lokup"), "prompt_lookup"),
        (lambda t: Generator(t, "prompt_lookup+griffin"), "needs a model"),
        (lambda t: Generator(t, "suffix+prompt_lookup+suffix"), "names the kind suffix twice"),
        (lambda t: Generator(t, "suffix+none"), "drafts nothing"),
        (lambda t: Generator(t, "suffix+lookahead"), "use it alone"),
        (
            lambda t: Generator(t, "suffix+prompt_lookup", drafter_options={"length": 3}),
            "KIND one of suffix, prompt_lookup",
        ),
        (lambda t: Generator(t, "runs/a+b/draft"), "does not exist"),
        (lambda t: Generator(t, "none", drafter_options={"length": 3}), "length"),
        (lambda t: Generator(t, NoDrafter(), drafter_options={"a": 3}), "drafter_options"),
        (lambda t: Generator(t, dtype="float32"), "loaded already"),
        (lambda t: Generator(t).generate([]), "There is no prompt"),
        (lambda t: Generator(t).generate("a", SamplingParams(stop_token_ids=[999])), "999"),
        (lambda t: Generator(t).generate([""]), "prompt 0 is empty"),
        (lambda t: Generator(t).generate([[]]), "Prompt 0 is empty"),
        (lambda t: Generator(t).generate([[1], [2, "a"]]), "Prompt 1"),
        (lambda t: Generator(t).generate([[{"role": "user"}]]), "`content`"),
        (lambda t: Generator(t).generate(["a" * 3000]), "context"),
        (lambda t: Generator(t, rule="mach").generate(TEXTS[0]), "'match'"),
        (lambda t: Generator(TabularTarget(8)).generate("text"), "tokenizer"),
        (lambda t: Generator(t, trust_remote_code=True), "loaded already"),
        (lambda t: Generator(t, None), "drafter must"),
        (lambda t: Generator(t, PromptLookup), "drafter must"),
        (lambda t: Generator(t).generate(None), "Prompt 0"),
        (lambda t: Generator(t).generate(3), "Prompt 0"),
        (lambda t: Generator(t).generate([1.0, 2.0]), "Prompt 0"),
        (lambda t: Generator(t).generate([[True, False]]), "Prompt 0"),
        (lambda t: Generator(t).generate(b"text"), "Prompt 0"),
        (lambda t: Generator(t).generate({"role": "user", "content": "a"}), "list of messages"),
        (lambda t: Generator(t).generate([{"role": "user", "content": None}]), "`content`"),
        (
            lambda t: Generator(TabularTarget(8), "prediction").generate([1], predictions="a"),
            "tokenizer",
        ),
    ],
)
def test_mistakes_are_named(target: HFTarget, wrong: Wrong, named: str) -> None:
    with pytest.raises(InputError, match=named):
        wrong(target)


def test_a_missing_model_is_a_backend_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError):
        Generator(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "kind",
    [
        "eagle",
        "hass",
        "fspad",
        "griffin",
        "eagle3",
        "medusa",
        "p_eagle",
        "parallel",
        "unrolled",
        "independent:x",
    ],
)
def test_an_unbound_drafter_says_what_to_call(kind: str) -> None:
    with pytest.raises(InputError, match=r"drafter\.bind\(target\)"):
        next(decode(tiny_target(64), load_drafter_unread(kind), [[1, 2]], DecodeOptions()))


def load_drafter_unread(kind: str) -> Drafter:
    from draftsmith.drafters.registry import make_drafter

    return make_drafter(kind)
