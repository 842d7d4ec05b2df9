"""`draftsmith collect`: prompts -> trajectories of the target, with its laws, in a store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.config import as_dict
from draftsmith.data.prompts import note_plain
from draftsmith.data.suites import load_prompts
from draftsmith.distill.config import CollectConfig
from draftsmith.errors import InputError
from draftsmith.provenance import digest, portable_text, start_run
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.distill.trajectories.store import StoreSummary, TrajectoryStore
    from draftsmith.distill.trajectories.types import Backend, CollectSettings
    from draftsmith.distill.trajectories.workers import MakeBackend, ShardDone, ShardPlan


@dataclass(frozen=True, kw_only=True)
class CollectOptions(CollectConfig, VerbOptions):
    """Collect a target's continuations and logprobs, to distil a draft model from."""


PRINT_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


@holds_out
def run(options: CollectOptions) -> dict[str, Any]:
    """Collect what is missing in `options.out`.

    Returns what the store holds then, and how many shards this run wrote.
    """
    from draftsmith.core.types import Signals
    from draftsmith.distill import tokenizer_training
    from draftsmith.distill.trajectories.collect import reason_to_skip
    from draftsmith.distill.trajectories.requests import (
        check_feature_room,
        known_turns,
        make_requests,
        make_settings,
        parse_features,
        reasons_to_cut,
        refuse,
    )
    from draftsmith.distill.trajectories.store import StoreHeader, TrajectoryStore, revision_of
    from draftsmith.distill.trajectories.workers import split

    record = start_run("collect", options, seed=options.seed, out=options.out)
    prompts = load_prompts(options.prompts, limit=options.limit, keep_empty=True)
    model, scale = options.model, options.scale
    tokenizer = tokenizer_training.load_tokenizer(model.target)
    config = tokenizer_training.text_config(model.target, model.revision, model.trust_remote_code)
    signals = parse_features(options.kept.feature_words(), config)
    settings = replace(make_settings(options), signals=signals)
    note_plain(prompts, tokenizer)
    requests = make_requests(options, prompts, tokenizer)
    unasked = sum(len(prompt.turns) + 1 - len(known_turns(prompt)) for prompt in prompts)
    if unasked:
        _say(
            f"{unasked} further turns of chats are not asked: the file does not answer them in turn"
        )
    header = StoreHeader(
        target=portable_text(model.target),
        revision=revision_of(model.target, model.revision),
        tokenizer_sha256=tokenizer_training.sha256(tokenizer, Path(model.target)),
        vocab_size=config.vocab_size,
        top_k=settings.top_k,
        signals=settings.signals,
        settings=as_dict(settings)
        | {"backend": scale.backend, "shard_size": scale.shard_size}
        | {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
        # other models, in effect; said where it is so, because stores are older than these options
        | ({"weights": model.weights} if model.weights != "auto" else {})
        | ({} if model.compile else {"compile": False})
        | ({} if model.fixed_width is None else {"fixed_width": model.fixed_width}),
        prompts_sha256=digest([[r.prompt_id, r.prompt, r.references] for r in requests]),
    )
    if settings.top_k is not None and settings.top_k > config.vocab_size:
        raise InputError(
            f"--top-k {settings.top_k} is more than the {config.vocab_size} tokens of the target; "
            "0 keeps whole laws"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and scale.backend == "vllm" and settings.forcing in ("beam", "gold"):
        limit -= 1  # vLLM scores a text as part of a prompt, and wants room for one token more
    plans = split(
        requests,
        scale.shard_size,
        why_not=partial(
            reason_to_skip, settings=settings, limit=limit, vocab_size=config.vocab_size
        ),
        why_cut=partial(reasons_to_cut, settings=settings, limit=limit),
    )
    bad = [skipped for plan in plans for skipped in plan.skipped]
    refuse(options.bad_prompts, bad)
    if len(bad) == len(requests):
        raise InputError(f"no prompt of {options.prompts} can be used: {bad[0].reason}")
    if settings.signals != Signals():
        there = TrajectoryStore(options.out, header)
        check_feature_room(scale, there, plans, settings, config)
    store = TrajectoryStore.create(options.out, header, max_bytes=scale.most_bytes())
    written = collect(options, plans, settings, store)
    summary = store.summary()
    record.write(options.out, results=asdict(summary) | {"settings": as_dict(settings)})
    print_summary(summary, options.out)
    result = {"out": str(options.out), "bytes_per_token": summary.bytes_per_token}
    names = ("trajectories", "tokens", "bytes", "feature_bytes", "skipped", "cut")
    return result | {name: getattr(summary, name) for name in names} | {"written": written}


def collect(
    options: CollectOptions,
    plans: Sequence[ShardPlan],
    settings: CollectSettings,
    store: TrajectoryStore,
) -> int:
    """Compute and write the shards that are missing, here or by workers; return their number."""
    import torch

    from draftsmith.distill.trajectories.workers import collect_local, collect_ray, missing_shards

    with CollectProgress(plans, store) as progress:
        missing = missing_shards(plans, store, progress.on_check)
        if options.scale.ray:
            workers, gpus = options.scale.workers, float(torch.cuda.is_available())
            make = make_backend(options)
            done = collect_ray(missing, make, settings, store, workers=workers, gpus=gpus)
        else:
            make = make_backend(options, progress.on_batch)
            done = collect_local(missing, make, settings, store)
        for shard in done:
            progress.on_shard(shard)
        return len(missing)


def make_backend(
    options: CollectOptions, on_batch: Callable[[int, int], None] | None = None
) -> MakeBackend:
    """What loads the target, here or in a worker; `on_batch` is called by those that can, and here
    only, what is done of a shard."""
    if options.scale.backend == "vllm":
        return partial(_vllm, options.model)
    return partial(_transformers, options.model, options.batch_size, on_batch)


def _transformers(
    model: ModelConfig, batch_size: int, on_done: Callable[[int, int], None] | None
) -> Backend:
    from draftsmith.distill.trajectories.collect import TransformersBackend
    from draftsmith.targets.hf import open_target

    target = open_target(model, quiet=True)
    return TransformersBackend(target, batch_size=batch_size, on_done=on_done)


def _vllm(model: ModelConfig) -> Backend:
    from draftsmith.distill.trajectories.vllm import VllmBackend

    if model.dtype == "float64":
        raise InputError("vLLM has no float64: choose another --dtype")
    return VllmBackend(
        model.target,
        dtype=model.dtype,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


class CollectProgress:
    """Prompts done and time left on stderr; plain lines if it is no terminal."""

    def __init__(self, plans: Sequence[ShardPlan], store: TrajectoryStore) -> None:
        console = Console(file=sys.stderr)
        self.sizes = {plan.number: len(plan.requests) for plan in plans}
        self.total = sum(self.sizes.values())
        self.before = sum(size for number, size in self.sizes.items() if store.has(number))
        self.prompts, self.tokens = self.before, 0  # of whole shards
        self.bar = Progress(
            TextColumn("collecting"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(
            "collecting", total=self.total, completed=self.before, status=""
        )
        self.began = self.printed = time.monotonic()

    def __enter__(self) -> CollectProgress:
        self.bar.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.bar.stop()

    def on_check(self, done: int, total: int) -> None:
        """So many of the shards that are there were checked; nothing stays of it in sight."""
        now = time.monotonic()
        if done == total:
            self.began = now  # the rate is that of collecting
        status = f"checked {done:,} of {total:,} shards" if done < total else ""
        self.bar.update(self.task, status=status)
        if status and self.bar.disable and now - self.printed >= PRINT_EVERY:
            self.printed = now
            _say(status)

    def on_shard(self, done: ShardDone) -> None:
        """A shard was written."""
        self.prompts += self.sizes[done.number]
        self.tokens += done.tokens
        self._show(self.prompts, self.tokens)

    def on_batch(self, prompts: int, tokens: int) -> None:
        """So much is done of the shard that is being computed."""
        known = self.prompts - self.before
        if known and self.tokens:  # the last of several temperatures ends all prompts at once
            expected = int(known * tokens / self.tokens)
            prompts = max(prompts, min(expected, max(self.sizes.values())))
        self._show(min(self.prompts + prompts, self.total), self.tokens + tokens)

    def _show(self, prompts: int, tokens: int) -> None:
        now = time.monotonic()
        spent = max(now - self.began, 1e-9)
        status = f"{tokens / spent:,.0f} tokens/s"
        self.bar.update(self.task, completed=prompts, status=status)
        if self.bar.disable and now - self.printed >= PRINT_EVERY:
            self.printed = now
            if prompts > self.before:
                left = (self.total - prompts) * spent / (prompts - self.before)
                status += f"  {left / 60:.1f} min left"
            _say(f"{prompts:,} of {self.total:,} prompts  {status}")


def print_summary(summary: StoreSummary, out: Path) -> None:
    """One line about the store, and one per reason for skipping or cutting."""
    each = summary.bytes_per_token
    size = "" if each is None else f", {each:.0f} bytes per token"
    if summary.feature_bytes:
        size += f", {summary.feature_bytes:,} bytes of hidden states"
    _say(f"{out}: {summary.trajectories:,} trajectories, {summary.tokens:,} tokens{size}")
    for reason, count in summary.skipped.items():
        _say(f"left out {count} prompts: {reason}")
    for reason, count in summary.cut.items():
        _say(f"cut {count} references: {reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
