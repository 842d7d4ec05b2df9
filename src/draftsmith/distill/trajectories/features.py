"""Hidden states of the target: what `--features` asks for, and how much room they take.

--features last            after the final norm
--features 1,15,28,last    outputs of layers too; stored in this order, `last` at the end
--features eagle3          what this drafter reads, whatever the target's number of layers

Prompts of a file that nothing can be learnt behind: what is wrong with them.

Which weights a target has: what a store of its laws says, and a training from it asks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, extract_commit_hash

from draftsmith.core.types import Signals
from draftsmith.distill.checkpoint import sha256
from draftsmith.distill.config import BadPromptConfig, ScaleConfig
from draftsmith.distill.trajectories.collect import draws
from draftsmith.distill.trajectories.store import Skipped, TrajectoryStore
from draftsmith.distill.trajectories.types import CollectSettings
from draftsmith.distill.trajectories.workers import ShardPlan
from draftsmith.drafters.config import drafter_parts
from draftsmith.drafters.registry import drafter_class
from draftsmith.errors import InputError
from draftsmith.provenance import check_room, digest
from draftsmith.targets.hf import loading

_BYTES = 2
"""Bytes of a number, in both types that a store keeps."""


def parse(words: Sequence[str], config: Any) -> Signals:
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


def spell(signals: Signals) -> str:
    """The words of --features that ask for these signals."""
    return ",".join([*map(str, signals.layers), *(["last"] if signals.last_hidden else [])])


def check_stores(stores: Iterable[TrajectoryStore], signals: Signals, *, with_text: bool) -> None:
    """InputError where hidden states that a drafter reads are not stored, or others are.

    `with_text`: it learns from --text, too.
    """
    if signals == Signals():
        return
    for store in stores:
        if store.header.signals != signals:
            raise InputError(
                f"this drafter reads hidden states ({spell(signals)}), and the store "
                f"{store.folder} holds {spell(store.header.signals) or 'none'}: collect with "
                f"--features {spell(signals)}, or let the target say them with --laws teacher"
            )
    if with_text:
        raise InputError(
            "--text has no stored hidden states, which this drafter reads: let the target say them "
            "with --laws teacher, or leave out --text"
        )


def width(signals: Signals, config: Any) -> int:
    """How many numbers these signals are at one place, for a target with this configuration."""
    return (len(signals.layers) + signals.last_hidden) * int(config.hidden_size)


def check(
    scale: ScaleConfig,
    store: TrajectoryStore,
    plans: Iterable[ShardPlan],
    settings: CollectSettings,
    config: Any,
) -> None:
    """Say how large the hidden states of what is missing in `store` will be, before anything is
    computed.

    Raises:
        InputError: what collects has none, or --max-bytes allows less than the prompts alone take.
        BackendError: the disk has less room than that.
    """
    if scale.backend == "vllm":
        raise InputError("--features needs --backend transformers: vLLM gives no hidden states")
    each = _BYTES * width(settings.signals, config)
    least = each * sum(  # and of every answer one token
        len(draws(request, settings)) * (len(request.prompt) + 1)
        for plan in plans
        for request in plan.requests
        if not store.has(plan.number)
    )
    if not least:
        return
    size = f"hidden states of at least {least:,} bytes ({each:,} per token)"
    print(f"collecting {size}", file=sys.stderr, flush=True)
    check_room(store.folder, least, scale.most_bytes(), size)


def why_not(prompt: Sequence[int], *, context: int | None, vocab_size: int) -> str | None:
    """Why a model with this context and vocabulary cannot continue it; None: it can."""
    if not prompt:
        return "empty prompt"
    if context is not None and len(prompt) >= context:
        return f"longer than the context of {context} tokens"
    if not in_vocabulary(prompt, vocab_size):
        return f"token outside the vocabulary of {vocab_size}"
    return None


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> bool:
    """Whether a vocabulary has them all: a tokenizer may hold more than its model was made for."""
    return all(0 <= token < vocab_size for token in tokens)


def refuse(options: BadPromptConfig, bad: Sequence[Skipped]) -> None:
    """InputError for these prompts, where --on-bad-prompt asks for one."""
    if bad and options.on_bad_prompt == "error":
        raise InputError(
            f"prompt {bad[0].prompt_id}: {bad[0].reason} ({len(bad)} such prompts; "
            "--on-bad-prompt skip leaves them out)"
        )


def revision_of(target: str, revision: str | None = None) -> str | None:
    """Return a digest of a folder's weights, or the commit that `revision` of a hub model is today.

    Where the commit cannot be told, `revision` itself. Raises BackendError: there is no such model.
    """
    weights = sorted(Path(target).glob("*.safetensors"))
    if weights:
        return digest([sha256(path) for path in weights])
    with loading(f"the configuration of {target!r}"):
        # its place in the cache names the commit; configurations no longer do
        config = cached_file(target, "config.json", revision=revision or "main")
    commit: str | None = extract_commit_hash(config, None)
    return commit or revision
