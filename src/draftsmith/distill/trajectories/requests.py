"""What a collection asks of its target: prompts as tokens, settings, and hidden states to keep.

`--features` names hidden states:

    --features last            after the final norm
    --features 1,15,28,last    outputs of layers too; stored in this order, `last` at the end
    --features eagle3          what this drafter reads, whatever the target's number of layers
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from draftsmith.core.types import Signals
from draftsmith.data.prompts import Message, Prompt
from draftsmith.distill.config import BadPromptConfig, CollectConfig, ScaleConfig
from draftsmith.distill.trajectories.collect import draws
from draftsmith.distill.trajectories.store import Skipped, TrajectoryStore
from draftsmith.distill.trajectories.types import CollectRequest, CollectSettings, Forcing
from draftsmith.distill.trajectories.workers import ShardPlan
from draftsmith.drafters.config import drafter_parts
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import InputError
from draftsmith.provenance import check_room

_log = logging.getLogger(__name__)

FEATURE_BYTES = 2
"""Bytes of a number of a hidden state, in both types that a store keeps."""


def make_settings(options: CollectConfig) -> CollectSettings:
    """What is wanted of every prompt, hidden states aside."""
    same = "top_p max_beams mass_gain length_penalty max_new_tokens seed".split()
    forcing: Forcing = "sample" if options.samples is not None else "greedy"
    forcing = "beam" if options.beams is not None else forcing
    return CollectSettings(
        forcing="gold" if options.gold else forcing,
        temperatures=options.sample_temperatures(),
        samples=options.samples or 1,
        beams=options.beams or 1,
        top_k=options.kept.top_k or None,
        **{name: getattr(options, name) for name in same},
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


def refuse(options: BadPromptConfig, bad: Sequence[Skipped]) -> None:
    """InputError for these prompts, where --on-bad-prompt asks for one."""
    if bad and options.on_bad_prompt == "error":
        raise InputError(
            f"prompt {bad[0].prompt_id}: {bad[0].reason} ({len(bad)} such prompts; "
            "--on-bad-prompt skip leaves them out)"
        )


def parse_features(words: Sequence[str], config: Any) -> Signals:
    """What --features asks for of a target with this configuration.

    Raises:
        InputError: a word that is none, a layer that is not there, a drafter that reads nothing.
    """
    numbers = [word for word in words if word != "last"]
    if len(words) == 1 and not all(map(str.isdigit, numbers)):
        kind, _ = drafter_parts(words[0])
        signals = drafter_class(kind).signals_of(config)
        if signals == Signals():
            raise InputError(f"--features {kind}: this drafter reads no hidden states")
        return signals
    if not all(map(str.isdigit, numbers)):
        raise InputError(
            "--features: layer numbers and 'last', by commas, or one drafter; got "
            f"{','.join(words)!r}"
        )
    layers = tuple(map(int, numbers))
    high = [layer for layer in layers if layer >= config.num_hidden_layers]
    if high:
        raise InputError(
            f"--features names layer {high[0]}, and the target has {config.num_hidden_layers} "
            "(they count from 0)"
        )
    return Signals(last_hidden="last" in words, layers=layers)


def spell_features(signals: Signals) -> str:
    """The words of --features that ask for these signals."""
    return ",".join([*map(str, signals.layers), *(["last"] if signals.last_hidden else [])])


def feature_width(signals: Signals, config: Any) -> int:
    """How many numbers these signals are at one place, for a target with this configuration."""
    return (len(signals.layers) + signals.last_hidden) * int(config.hidden_size)


def check_feature_room(
    scale: ScaleConfig,
    store: TrajectoryStore,
    plans: Iterable[ShardPlan],
    settings: CollectSettings,
    config: Any,
) -> None:
    """Log how large the hidden states of what is missing in `store` will be, before anything is
    computed.

    Raises:
        InputError: what collects has none, or --max-bytes allows less than the prompts alone take.
        BackendError: the disk has less room than that.
    """
    if scale.backend == "vllm":
        raise InputError("--features needs --backend transformers: vLLM gives no hidden states")
    each = FEATURE_BYTES * feature_width(settings.signals, config)
    least = each * sum(  # and of every answer one token
        len(draws(request, settings)) * (len(request.prompt) + 1)
        for plan in plans
        for request in plan.requests
        if not store.has(plan.number)
    )
    if not least:
        return
    size = f"hidden states of at least {least:,} bytes ({each:,} per token)"
    _log.info("collecting %s", size)
    check_room(store.folder, least, scale.most_bytes(), size)


def check_stored_features(
    stores: Iterable[TrajectoryStore], signals: Signals, *, with_text: bool
) -> None:
    """InputError where hidden states that a drafter reads are not stored, or others are.

    `with_text`: it learns from --text, too.
    """
    if signals == Signals():
        return
    wanted = spell_features(signals)
    for store in stores:
        if store.header.signals != signals:
            raise InputError(
                f"this drafter reads hidden states ({wanted}), and the store {store.folder} holds "
                f"{spell_features(store.header.signals) or 'none'}: collect with --features "
                f"{wanted}, or let the target compute them with --laws teacher"
            )
    if with_text:
        raise InputError(
            "--text has no stored hidden states, which this drafter reads: let the target compute "
            "them with --laws teacher, or leave out --text"
        )
