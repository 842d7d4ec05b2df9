"""A session that was cut off in the middle of anything answers the next call as if it were new."""

from __future__ import annotations

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from draftsmith.core.decode import DecodeOptions, Session, decode
from draftsmith.core.generation import generate
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import InputError
from draftsmith.targets import base
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import tiny_target

A = [t % 60 for t in range(30)]
B = [(7 * t) % 60 for t in range(41)]
SHORT = [5, 4]
OPTIONS = DecodeOptions(max_new_tokens=6)
DRAFTERS = {
    "none": NoDrafter,
    "prompt_lookup": PromptLookup,
    "lookahead": Lookahead,
    "independent": lambda: Independent(Independent.Config(), model=tiny_target(64, seed=1)),
}


class Cut(Exception):
    """What stops a forward: an interrupt, a full memory, broken weights."""


def answer(target: HFTarget, drafter: Drafter, prompt: list[int], session: Session) -> list[int]:
    out: list[int] = []
    for step in decode(target, drafter, [prompt], OPTIONS, session=session):
        out += step.emitted[0]
    return out


@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("after", range(8))
@pytest.mark.every(3)
def test_an_interrupted_call_leaves_no_wrong_text_behind(
    make: type[Drafter], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CHUNK", 8)  # long prompts take several forwards
    target = tiny_target(64)
    drafter = make()
    drafter.bind(target)
    session = Session()
    wanted = answer(target, drafter, A, session)
    forward, calls = target.forward, 0

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Cut
        return forward(*args)

    monkeypatch.setattr(target, "forward", failing)
    with pytest.raises(Cut):
        answer(target, drafter, B, session)
    monkeypatch.setattr(target, "forward", forward)
    assert answer(target, drafter, A, session) == wanted
    assert answer(target, drafter, SHORT, session) == answer(target, drafter, SHORT, Session())


def test_a_refused_call_leaves_no_wrong_text_behind() -> None:
    target, drafter, session = tiny_target(64), NoDrafter(), Session()
    wanted = answer(target, drafter, A, session)
    with pytest.raises(InputError, match="1 rows"):
        list(decode(target, drafter, [A, B], OPTIONS, session=session))
    with pytest.raises(InputError, match="empty"):
        answer(target, drafter, [], session)
    assert answer(target, drafter, A, session) == wanted


def test_a_prompt_far_beyond_the_draft_models_positions_is_decoded_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learned positions end: beyond them there is nothing to look up."""
    monkeypatch.setattr(base, "CHUNK", 16)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=24,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    draft = HFTarget(OPTForCausalLM(config).double())
    target = tiny_target(64)
    drafter = Independent(Independent.Config(), model=draft)
    drafter.bind(target)
    for prompt in (A, B, B + A):
        (plain,) = generate(target, NoDrafter(), [prompt], OPTIONS)
        (made,) = generate(target, drafter, [prompt], OPTIONS)
        assert made.token_ids == plain.token_ids
        assert made.metrics.accepted == 0


def test_lookahead_without_a_limit_stays_inside_its_largest_size() -> None:
    drafter = Lookahead(Lookahead.Config(window=3, ngram=3, guesses=-1))
    target = tiny_target(8)
    drafter.bind(target)
    limit = drafter.max_nodes(drafter.default_shape)
    prompt = [t * t % 8 for t in range(60)]
    options = DecodeOptions(max_new_tokens=60)
    assert all(step.proposed[0] <= limit for step in decode(target, drafter, [prompt], options))
