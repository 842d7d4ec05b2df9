"""Calls of the public API that cannot be meant are refused in the user's words, before anything is
decoded; numpy's integers, arrays and iterators are welcome."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftsmith
from draftsmith import DecodeOptions, Generator, Sampler, SamplingParams, Session, TreeShape
from draftsmith.core.decode import decode
from draftsmith.core.law import Noise
from draftsmith.core.verify import Match
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.prediction import PredictionDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.recycling import Recycling
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import AdaptiveLength
from draftsmith.targets.hf import HFTarget

V = 16
FOUR = DecodeOptions(max_new_tokens=4)


@cache
def target(seed: int = 0, size: int = V) -> HFTarget:
    return draftsmith.tiny_target(size, seed=seed, layers=1)


def lookup() -> Drafter:
    return PromptLookup()


def independent() -> Drafter:
    return Independent(Independent.Config(), model=target(1))


def run(
    prompts: Any = ((1, 2, 3),),
    drafter: Any = None,
    model: Any = None,
    options: Any = FOUR,
    **more: Any,
) -> list[int]:
    drafter = lookup() if drafter is None else drafter
    model = target() if model is None else model
    steps = decode(model, drafter, prompts, options, **more)
    return [token for step in steps for token in step.emitted[0]]


def bound(drafter: Drafter) -> Drafter:
    drafter.bind(target())
    return drafter


PROMPTS = {
    "text": "text",
    "texts": ["text"],
    "flat": [1, 2, 3],
    "none": None,
    "floats": [[1.0, 2.0]],
    "not-a-number": [[math.nan]],
    "true": [[True]],
    "nested": [np.array([[1, 2], [3, 4]])],
    "mapping": {1: 2},
    "no-rows": [],
    "used-up": iter(()),
    "no-tokens": [[]],
    "outside": [[V]],
    "negative": [[-1]],
    "huge": [[2**70]],
    "iterator-of-tokens": [iter([1, 2])],
    "as-long-as-the-context": [[1] * 512],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_what_is_no_list_of_token_ids_is_refused(prompts: Any) -> None:
    with pytest.raises(InputError, match=r"[Pp]rompt"):
        run(prompts)


@pytest.mark.parametrize("prompts", ["text", ["text"], [1, 2]])
def test_generate_takes_token_ids_and_names_who_takes_texts(prompts: Any) -> None:
    with pytest.raises(InputError, match=r"[Pp]rompt.*draftsmith\.Generator"):
        draftsmith.generate(target(), lookup(), prompts, DecodeOptions())


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([[1, 2, 3]]),
        torch.tensor([[1, 2, 3]]),
        [np.array([1, 2, 3], dtype=np.int32)],
        [[np.int64(1), np.uint8(2), 3]],
        [range(1, 4)],
        iter([(1, 2, 3)]),
    ],
)
def test_arrays_tensors_and_iterators_are_prompts(prompts: Any) -> None:
    options = DecodeOptions(max_new_tokens=np.int64(4), seed=np.int64(0))
    assert run(prompts, options=options, request_ids=np.array([0])) == run()


@pytest.mark.parametrize("request_id", [2**63, -1, True, 1.5, "a", None])
def test_a_request_id_is_a_whole_number_of_63_bits(request_id: Any) -> None:
    with pytest.raises(InputError, match=r"request id.*2\^63"):
        run(request_ids=[request_id])
    assert run(request_ids=[2**63 - 1])


@pytest.mark.parametrize("ids", ["1", 1, [1, 2]])
def test_there_is_a_request_id_per_row(ids: Any) -> None:
    with pytest.raises(InputError, match=r"request.ids"):
        run(request_ids=ids)


@pytest.mark.parametrize("predictions", ["ab", ["ab"], [3], [[1.5]], [[V]], [[1], [2]]])
@pytest.mark.parametrize("make", [PredictionDrafter, PromptLookup])
def test_predictions_are_token_ids_of_the_target(
    make: Callable[[], Drafter], predictions: Any
) -> None:
    with pytest.raises(InputError, match="rediction"):
        run(drafter=make(), predictions=predictions)


FILLED: tuple[tuple[Callable[[], Drafter], Callable[[], Drafter]], ...] = (
    (lookup, independent),
    (independent, lookup),
    (independent, independent),
)


@pytest.mark.parametrize(("first", "second"), FILLED)
def test_a_session_goes_on_with_what_it_was_opened_with(
    first: Callable[[], Drafter], second: Callable[[], Drafter]
) -> None:
    session, drafter, other = Session(), bound(first()), bound(second())
    run(drafter=drafter, session=session)
    longer = [[1, 2, 3, 4]]
    with pytest.raises(InputError, match=r"drafter.*session\.clear\(\)"):
        run(longer, drafter=other, session=session)
    with pytest.raises(InputError, match=r"target.*session\.clear\(\)"):
        run(longer, drafter=drafter, model=target(7), session=session)
    expected = run(longer, drafter=drafter)
    assert run(longer, drafter=drafter, session=session) == expected
    session.clear()
    assert run(longer, drafter=other, session=session) == expected


def test_a_session_is_made_of_nothing() -> None:
    """Not of a target: it opens with what the first call is given."""
    with pytest.raises(TypeError, match="positional"):
        Session(target())  # type: ignore[call-arg, misc]


def remembering() -> Drafter:
    return Recycling(Recycling.Config(memory=True))


def remembering_texts() -> Drafter:
    return Suffix(Suffix.Config(memory=100))


REMEMBER = [remembering, remembering_texts]
"""They would draft tokens of one target for another."""


@pytest.mark.parametrize("make", [independent, Eagle, Medusa, *REMEMBER])
def test_an_unbound_drafter_says_what_to_call(make: Callable[[], Drafter]) -> None:
    with pytest.raises(InputError, match=r"\.bind\(target\)"):
        run(drafter=make())


@pytest.mark.parametrize("make", [independent, Eagle, Medusa, *REMEMBER])
def test_a_drafter_of_another_target_says_what_to_call(make: Callable[[], Drafter]) -> None:
    with pytest.raises(InputError, match=r"\.bind\(target\)"):
        run(drafter=bound(make()), model=target(0, 2 * V))


def test_a_second_drafter_of_another_target_says_what_to_call() -> None:
    drafter = bound(Cascade([PredictionDrafter(), independent()]))
    with pytest.raises(InputError, match=r"\.bind\(target\)"):
        run(drafter=drafter, model=target(0, 2 * V))


@pytest.mark.parametrize("other", [{"hidden": 64}, {"layers": 2}])
@pytest.mark.parametrize("make", [Eagle, Medusa])
def test_a_drafter_that_reads_states_of_another_size_says_what_to_call(
    make: Callable[[], Drafter], other: dict[str, int]
) -> None:
    model = draftsmith.tiny_target(V, **{"layers": 1, **other})
    with pytest.raises(InputError, match=r"\.bind\(target\)"):
        run(drafter=bound(make()), model=model)
    assert run(drafter=bound(independent()), model=model), "a draft model reads no states"


def test_one_session_is_for_one_call_at_a_time() -> None:
    drafter, session = bound(independent()), Session()
    first = decode(target(), drafter, [[1, 2, 3]], FOUR, session=session)
    next(first)
    second = decode(target(), drafter, [[4, 5, 6, 7]], FOUR, session=session)
    text = list(next(second).emitted[0])
    with pytest.raises(InputError, match=r"session.*Session\(\)"):
        next(first)
    text += [token for step in second for token in step.emitted[0]]
    assert text == run([[4, 5, 6, 7]], drafter=drafter)


def test_an_unbound_draft_model_does_not_propose() -> None:
    with pytest.raises(InputError, match=r"\.bind\(target\)"):
        independent().propose(
            None,  # type: ignore[arg-type]
            TreeShape.chain(2),
            np.array([2]),
            Sampler(),
            Noise(0, [0], [1]),
        )


MISTAKEN = {
    "drafter": {"drafter": "prompt_lookup"},
    "drafter-class": {"drafter": PromptLookup},
    "target": {"model": "a/folder"},
    "options": {"options": SamplingParams()},
    "target-class": {"model": HFTarget},
    "session": {"session": "a"},
}


@pytest.mark.parametrize("name", MISTAKEN)
def test_decode_names_what_is_of_another_kind(name: str) -> None:
    with pytest.raises(InputError, match=name.partition("-")[0]):
        run(**MISTAKEN[name])


def cases(values: dict[str, Sequence[Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, several in values.items() for value in several]
    )


WHOLE = (1.5, "3", True, math.nan)


@cases(
    {
        "sampler": [None, SamplingParams(), "x"],
        "verifier_sampler": [5],
        "max_new_tokens": [0, -1, None, *WHOLE],
        "rule": [5, None, Match],
        "shape": [5, "4,2", (2, 2), TreeShape],
        "policy": [5, "auto", AdaptiveLength],
        "seed": [-1, 2**63, None, *WHOLE],
        "stop_strings": ["abc", (5,), None, 5],
        "stop_token_ids": [(V,), (-1,), ("a",), 5, None, (1.5,), (True,)],
        "ignore_end": ["no", None],
    }
)
def test_options_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        run(options=DecodeOptions(**{"max_new_tokens": 4, name: value}))


@cases(
    {
        "temperature": ["1", None, math.nan, math.inf, -1, True, 1e-300, 10**400, [1]],
        "top_k": [-1, None, *WHOLE],
        "top_p": [0, 2, math.nan, "x", None],
        "min_p": [-1, math.nan, "x"],
        "repetition_penalty": [0, -1, math.nan, math.inf, 1e308, 5e-324, "x", None],
        "presence_penalty": [math.inf, 1e308, "x", None],
        "frequency_penalty": [math.nan, -1e308],
        "logit_bias": [
            ((V, 1.0),),
            ((-1, 1.0),),
            ((1, math.nan),),
            tuple((token, -math.inf) for token in range(V)),
            ((1, 1e308),),
            ((1, "x"),),
            (("a", 1.0),),
            ((1.5, 1.0),),
            ((1,),),
            {1: 2.0},
            "a",
            None,
        ],
    }
)
def test_samplers_without_laws_are_refused(name: str, value: Any) -> None:
    def sample() -> None:
        sampler = Sampler(**{"temperature": 1.0, name: value})
        run(options=DecodeOptions(max_new_tokens=4, sampler=sampler))

    with pytest.raises(InputError, match=name):
        sample()


@cases(
    {
        "n": [0, 10**12, None, *WHOLE],
        "temperature": ["1", None, math.nan, []],
        "top_k": [-2, None, *WHOLE],
        "seed": [-1, 2**63, *WHOLE],
        "stop": [5, ["a", 5], "", [""]],
        "stop_token_ids": [5, "ab", [1.5], [-1], [True]],
        "max_tokens": [0, -1, *WHOLE],
        "logit_bias": [5, [1], {"a": 1.0}, {1: "x"}, {1: None}, {1.5: 1.0}, {-1: 1.0}],
        "ignore_eos": ["no", 5, None],
    }
)
def test_sampling_params_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


def test_numpys_numbers_are_numbers() -> None:
    bias = {np.int64(1): np.float32(1)}
    params = SamplingParams(top_k=np.int64(3), temperature=np.float32(0.5), logit_bias=bias)
    run(options=DecodeOptions(max_new_tokens=4, sampler=Sampler.from_params(params)))


@cases(
    {
        "widths": [(0,), (-1,), "3", 5, None, (1.5,), ("2",), [2], (True,), (10**9,), (9,) * 6],
        "paths": [((1,),), 5, ((),), ((0.5,),), [[0]], tuple((n,) for n in range(5000))],
        "keep": [3, 0, "3"],
    }
)
def test_shapes_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError):
        TreeShape(**{name: value})


@pytest.mark.parametrize("length", [-1, "5", 2.5, True, None, 10**9])
def test_a_chain_has_a_length(length: Any) -> None:
    with pytest.raises(InputError, match="length"):
        TreeShape.chain(length)


def test_a_tree_wider_than_the_vocabulary_is_refused() -> None:
    options = DecodeOptions(shape=TreeShape(widths=(V + 1,)))
    with pytest.raises(InputError, match=f"{V + 1} children.*{V} tokens"):
        run(drafter=bound(independent()), options=options)


@cases(
    {
        "target": [5, None, HFTarget],
        "drafter": [5, None, PromptLookup],
        "shape": ["4,2"],
        "rule": [5],
        "policy": ["auto"],
        "allow_lossy": ["yes"],
        "drafter_options": [["length=5"], "length=5"],
    }
)
def test_a_generator_names_what_is_of_another_kind(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Generator(**{"target": target(), "drafter": "prompt_lookup", name: value})


@cases(
    {
        "params": [{"temperature": 1}],
        "batch_size": [0, -1, None, *WHOLE],
        "predictions": [5, [None], [[1], [2]]],
        "on_step": [5, "x"],
        "on_done": [[print]],
    }
)
def test_a_generator_refuses_arguments_of_another_kind(name: str, value: Any) -> None:
    generator = Generator(target(), "prompt_lookup")
    with pytest.raises(InputError, match=name.removesuffix("s")[1:]):
        generator.generate([1, 2], **{name: value})


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab"), [b"ab"]])
def test_a_generator_takes_no_bytes_for_token_ids(prompt: Any) -> None:
    with pytest.raises(InputError, match=r"[Pp]rompt"):
        Generator(target(), "prompt_lookup").generate(prompt)


@pytest.mark.parametrize("model", ["a/folder", None, HFTarget])
def test_generate_takes_a_loaded_model(model: Any) -> None:
    with pytest.raises(InputError, match=r"target.*load_target"):
        draftsmith.generate(model, lookup(), [[1]], FOUR)


def test_the_tokens_of_a_result_are_pythons_integers() -> None:
    prompt = [np.int64(1), np.uint8(2)]
    (made,) = draftsmith.generate(target(), lookup(), [prompt], FOUR)
    assert json.loads(json.dumps([made.prompt_tokens, made.token_ids]))[0] == [1, 2]


@pytest.mark.parametrize("params", [5, None, {"temperature": 0}])
def test_steps_take_sampling_params(params: Any) -> None:
    with pytest.raises(InputError, match="params must be a SamplingParams"):
        Generator(target(), lookup()).steps([[1]], params)


def test_a_prediction_is_missing() -> None:
    with pytest.raises(InputError, match=r"2 prompts.*predictions"):
        draftsmith.generate(
            target(), PredictionDrafter(), [[1], [2]], DecodeOptions(), predictions=[[1]]
        )


@pytest.mark.parametrize("value", [None, 5, b"none", ["none"]])
@pytest.mark.parametrize("load", ["load_drafter", "load_target", "load_suite"])
def test_what_is_loaded_has_a_name(load: str, value: Any) -> None:
    with pytest.raises(InputError, match="a text or a path"):
        getattr(draftsmith, load)(value)


@cases(
    {
        "dtype": [5, None, torch.float64],
        "device": [0, torch.device("cpu")],
        "attn_implementation": [5, ["sdpa"]],
        "revision": [5],
        "trust_remote_code": ["no", 1],
        "compile": ["no", 1, None],
        "weights": ["int5", None],
    }
)
@pytest.mark.parametrize("load", [draftsmith.load_target, Generator])
def test_how_a_model_is_loaded_is_said_in_words(
    load: Callable[..., object], name: str, value: Any
) -> None:
    with pytest.raises(InputError, match=f"{name} must be (a str, such as|a bool|one of auto)"):
        load(str(TARGET), **{name: value})


@pytest.mark.parametrize("assignments", [5, None, [5], "length=5", {"length": 5}])
def test_assignments_are_texts(assignments: Any) -> None:
    with pytest.raises(InputError):
        draftsmith.load_drafter("prompt_lookup", assignments)


@pytest.mark.parametrize("load", ["load_drafter", "load_target", "load_suite"])
def test_a_name_may_be_too_long(load: str) -> None:
    with pytest.raises(InputError, match="too long for a path"):
        getattr(draftsmith, load)(f"independent:{'a' * 5000}")


def test_a_long_name_is_no_drafter() -> None:
    with pytest.raises(InputError, match="Unknown drafter"):
        draftsmith.load_drafter("a" * 5000)


@cases(
    {
        "vocab_size": [0, -1, *WHOLE],
        "layers": [0],
        "hidden": [3],
        "max_length": [0],
        "seed": [-1, "x"],
        "dtype": ["float64"],
    }
)
def test_toys_have_a_size(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        draftsmith.tiny_target(**{name: value})
    if name in ("vocab_size", "seed"):
        with pytest.raises(InputError, match=name):
            draftsmith.TabularTarget(**{name: value})


TARGET = Path(__file__).parents[2] / "models" / "mini-code" / "target"
HALF = "half a surrogate: \ud83d"


@cases(
    {
        "prompts": [HALF, [HALF], [{"role": "user", "content": HALF}]],
        "predictions": [HALF],
        "params": [SamplingParams(stop=HALF)],
    }
)
def test_half_a_character_is_no_text(name: str, value: Any) -> None:
    generator = Generator(TARGET, "prompt_lookup")
    with pytest.raises(InputError, match="surrogate"):
        generator.generate(**{"prompts": "def main(", name: value})
