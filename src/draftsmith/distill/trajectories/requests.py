"""Requests from prompts, and the settings of a collection."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from draftsmith.data.prompts import Message, Prompt
from draftsmith.distill.config import CollectConfig
from draftsmith.distill.trajectories.features import in_vocabulary, why_not
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings, Forcing
from draftsmith.errors import InputError


def make_settings(options: CollectConfig) -> CollectSettings:
    """What is wanted of every prompt, hidden states aside."""
    forcing: Forcing = "greedy"
    if options.gold:
        forcing = "gold"
    elif options.beams is not None:
        forcing = "beam"
    elif options.samples is not None:
        forcing = "sample"
    return CollectSettings(
        forcing=forcing,
        temperatures=options.sample_temperatures(),
        samples=options.samples or 1,
        top_p=options.top_p,
        beams=options.beams or 1,
        max_beams=options.max_beams,
        mass_gain=options.mass_gain,
        length_penalty=options.length_penalty,
        max_new_tokens=options.max_new_tokens,
        top_k=options.kept.top_k or None,
        seed=options.seed,
    )


def make_requests(
    options: CollectConfig, prompts: tuple[Prompt, ...], tokenizer: Any
) -> list[CollectRequest]:
    """Prompts as tokens, chat template applied, every turn of a chat behind the answers that the
    file gives to those before it; references end with the end token."""
    if options.system and not any(prompt.is_chat for prompt in prompts):
        raise InputError("--system is for chats, and no prompt of this file is one")
    end = tokenizer.eos_token_id
    requests = []
    for number, prompt in enumerate(prompts):
        asked = prompt
        if options.system and prompt.is_chat:
            asked = with_system(prompt, options.system[number % len(options.system)])
        for turn, (before, answers) in enumerate(known_turns(prompt), start=1):
            references = (
                tuple(
                    (*tokenizer.encode(text, add_special_tokens=False), end)
                    for text in answers
                    if text
                )
                if options.gold
                else ()
            )
            requests.append(
                CollectRequest(
                    prompt_id=prompt.id if turn == 1 else f"{prompt.id}, turn {turn}",
                    prompt=asked.token_ids(tokenizer, before) if asked.text != "" else (),
                    references=references,
                    language=prompt.language,
                    tag=prompt.tag,
                )
            )
    return requests


def known_turns(prompt: Prompt) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(answers before it, its references) of every turn of the user that can be asked: the first,
    and those that the file answers like all before them."""
    turns = range(max(1, len(prompt.answers)))
    return [(prompt.answers[:turn], prompt.expected(turn)) for turn in turns]


def with_system(prompt: Prompt, system: str) -> Prompt:
    """The chat with this system prompt in place of its own."""
    rest = [message for message in prompt.messages if message.role != "system"]
    return replace(prompt, messages=(Message(role="system", content=system), *rest))


def reason_to_skip(
    request: CollectRequest, *, settings: CollectSettings, limit: int | None, vocab_size: int
) -> str | None:
    bad = why_not(request.prompt, context=limit, vocab_size=vocab_size)
    if bad is not None or settings.forcing != "gold":
        return bad
    if not request.references:
        return "no reference"
    if not all(in_vocabulary(tokens, vocab_size) for tokens in request.references):
        return f"token of a reference outside the vocabulary of {vocab_size}"
    return None


def reasons_to_cut(
    request: CollectRequest, *, settings: CollectSettings, limit: int | None
) -> list[str]:
    """Return a reason for each reference that goes on behind the last token that is kept."""
    if settings.forcing != "gold":
        return []
    most, left = settings.max_new_tokens, (limit or sys.maxsize) - len(request.prompt)
    reason = f"longer than --max-new-tokens {most}"
    if left < most:
        reason = f"longer than what the prompt leaves of the context of {limit} tokens"
    return [reason] * sum(len(tokens) > min(most, left) for tokens in request.references)
