"""Hidden states of the target: what `--features` asks for, and how much room they take.

--features last            after the final norm
--features 1,15,28,last    outputs of layers too; stored in this order, `last` at the end
--features eagle3          what this drafter reads, whatever the target's number of layers
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.distill.collect import draws
from draftsmith.distill.room import check_room
from draftsmith.distill.scale_out import ShardPlan
from draftsmith.distill.store import TrajectoryStore
from draftsmith.distill.trajectory import CollectSettings
from draftsmith.drafter_names import drafter_parts
from draftsmith.drafters._lookup import drafter_class
from draftsmith.errors import InputError
from draftsmith.option_groups import ScaleOptions
from draftsmith.types import Signals

_BYTES = 2
"""Of a number, in both types that a store keeps."""


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
    scale: ScaleOptions,
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
