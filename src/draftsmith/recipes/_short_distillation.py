"""Collect and distil by the ordinary verbs, in about so many seconds each.

How much that is must be known before: a store is named by its prompts, and a learning rate follows
the number of steps. So each begins with a short trial that is thrown away:

    trial: one batch, a few tokens     seconds a text     -> so many prompts    `draftsmith collect`
    trial: a few steps on a copy       seconds a step     -> so many steps      `draftsmith distill`
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftsmith.bench.prompt import Prompt
from draftsmith.decode import DecodeOptions, decode
from draftsmith.distill.store import TrajectoryStore
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import InputError
from draftsmith.option_groups import (
    KeptOptions,
    ModelOptions,
    ScaleOptions,
    ScheduleOptions,
    VerbOptions,
)
from draftsmith.options import CollectOptions, DistillOptions
from draftsmith.provenance import append_jsonl, command_line
from draftsmith.recipes import _tokens
from draftsmith.recipes import collect as collect_recipe
from draftsmith.recipes import distill as distill_recipe
from draftsmith.recipes._students import open_student
from draftsmith.recipes._training import start_accelerator, work_folder
from draftsmith.sampler import Sampler
from draftsmith.targets._base import Target

BATCH = 32
"""Texts that are continued together, and prompts of a shard."""
TOP_K = 50
FEWEST_PROMPTS = 8
TRIAL_TOKENS = 12
TRIAL_STEPS = 5
FEWEST_STEPS = 4
BLOCK_MULTIPLE = 128
BATCH_BLOCKS = 8
"""Blocks of an optimiser step, each long enough for the longest text."""
LEARNING_RATE = 1e-3
"""More than `distill` takes by itself: a model of one layer and a minute bear it."""
EVALUATIONS = 4
"""Of held-out acceptance, the last step's included; the best weights are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What the target said."""

    store: Path
    prompts: int
    trajectories: int
    tokens: int
    """Of the continuations."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Distilled:
    """A draft model that learnt from it."""

    draft: Path
    steps: int
    tokens: int
    """Fed in all steps, prompts and repetitions included."""
    seconds: float


# --------------------------------------------------------------------------- collect


def collect(
    target: Target,
    source: str,
    prompts: Iterator[Prompt],
    folder: Path,
    *,
    temperatures: Sequence[float],
    seconds: float,
    max_new_tokens: int,
    seed: int,
    console: Console,
) -> Collected:
    """Have the target continue as many of the prompts as it can in this time: `folder/store`.

    Args:
        source: the target's folder.
        prompts: more than can be used; taken from the front.
        temperatures: a prompt is continued once at each. Those of the decoding that is to become
            faster: its texts are what the draft model will meet.

    Raises:
        InputError: there are none, or none that the target has room for.
        BackendError: the disk is full.
    """
    began = time.monotonic()
    first = tuple(islice(prompts, BATCH))
    if len(first) < 2:
        raise InputError("There are no prompts to collect on: at least two are needed.")
    each = len(temperatures) * seconds_per_text(target, first, max_new_tokens, seed)
    left = seconds - (time.monotonic() - began)
    count = max(FEWEST_PROMPTS, int(left / each))
    chosen = tuple(islice(chain(first, prompts), count))
    path = folder / "prompts.jsonl"
    append_jsonl(path, *({"id": prompt.id, "text": prompt.text} for prompt in chosen))
    options = CollectOptions(
        model=ModelOptions(target=source),
        prompts=path,
        out=folder / "store",
        samples=1,
        temperatures=",".join(f"{temperature:g}" for temperature in temperatures),
        kept=KeptOptions(top_k=min(TOP_K, target.vocab_size)),
        max_new_tokens=max_new_tokens,
        batch_size=BATCH,
        scale=ScaleOptions(shard_size=BATCH),
        seed=seed,
    )
    options.validate()
    _announce(
        f"The target continues {len(chosen)} prompts by up to {max_new_tokens} tokens, at "
        f"temperature {' and '.join(f'{t:g}' for t in temperatures)}: about "
        f"{each * len(chosen):.0f} s.",
        "collect",
        options,
        console,
    )
    made = collect_recipe.run(options)
    return Collected(
        store=options.out,
        prompts=len(chosen),
        trajectories=made.trajectories,
        tokens=made.tokens,
        seconds=time.monotonic() - began,
    )


def seconds_per_text(
    target: Target, prompts: tuple[Prompt, ...], max_new_tokens: int, seed: int
) -> float:
    """Of continuing a batch like these: a forward over the prompts, and one step per further token,
    which a few steps tell."""
    room = target.max_length or 1 << 40
    texts = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    texts = [text for text in texts if 0 < len(text) < room]
    if not texts:
        raise InputError(f"No prompt fits into the {room} positions of {target.name}.")
    tokens = min(TRIAL_TOKENS, max_new_tokens)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0), max_new_tokens=tokens, seed=seed, ignore_end=True
    )
    marks = [time.monotonic()]
    marks += [time.monotonic() for _ in decode(target, NoDrafter(), texts, options)]
    first, *later = (after - before for before, after in pairwise(marks))
    step = statistics.median(later) if later else 0.0
    return max((first + (max_new_tokens - 1) * step) / len(texts), 1e-9)


# --------------------------------------------------------------------------- distil


def distil(
    source: str,
    draft: str,
    collected: Collected,
    folder: Path,
    *,
    seconds: float,
    seed: int,
    console: Console,
) -> Distilled:
    """Train the draft model on the store for about so long: `folder/draft`.

    Args:
        source: the target's folder.
        draft: the folder of the draft model to start from; it is left as it is.

    Raises:
        InputError: the two models have different tokenizers.
        BackendError: the disk is full.
    """
    began = time.monotonic()
    block = block_length(collected.store)
    options = DistillOptions(
        target=source,
        drafter=draft,
        store=(collected.store,),
        out=folder / "draft",
        training=ScheduleOptions(
            duration=f"{TRIAL_STEPS}steps",
            block_length=block,
            batch_tokens=BATCH_BLOCKS * block,
            learning_rate=LEARNING_RATE,
            warmup=1,
            schedule="cosine",
            betas=(0.9, 0.999),
            weight_decay=0.0,
        ),
        save_every=1_000_000,  # the end and an interruption save one anyway
        seed=seed,
    )
    each, evaluation = seconds_per_step(options)
    left = seconds - (time.monotonic() - began) - (EVALUATIONS + 1) * evaluation
    steps = max(FEWEST_STEPS, int(left / each))
    options = replace(
        options,
        training=replace(options.training, duration=f"{steps}steps", warmup=max(1, steps // 10)),
        eval_every=max(1, math.ceil(steps / EVALUATIONS)),
    )
    options.validate()
    _announce(
        f"The draft model learns from {collected.tokens:,} tokens and their laws in {steps} steps: "
        f"about {steps * each + (EVALUATIONS + 1) * evaluation:.0f} s.",
        "distill",
        options,
        console,
    )
    made = distill_recipe.run(options)
    return Distilled(
        draft=options.out, steps=made.steps, tokens=made.tokens, seconds=time.monotonic() - began
    )


def block_length(store: Path) -> int:
    """Room for the longest text of a store and the separator behind it."""
    texts = TrajectoryStore.open(store).trajectories()
    longest = max(len(text.prompt) + len(text.tokens) + 1 for text in texts)
    return BLOCK_MULTIPLE * math.ceil(longest / BLOCK_MULTIPLE)


def seconds_per_step(options: DistillOptions) -> tuple[float, float]:
    """Of a step and of an evaluation, by a few on a copy of the draft model that is thrown away."""
    tokenizer = _tokens.load_tokenizer(options.target)
    student = open_student(options, tokenizer)
    accelerator = start_accelerator(options, options.training)
    with work_folder(options.out):
        lesson = distill_recipe.make_lesson(options, tokenizer, student, None)
        trainer = distill_recipe.make_trainer(options, student, lesson, TRIAL_STEPS, accelerator)
        marks = [time.monotonic()]
        for _ in range(TRIAL_STEPS):
            trainer.one_step()
            marks.append(time.monotonic())
        trainer.evaluate()
        evaluation = time.monotonic() - marks[-1]
    # the first step pays for what all others find ready
    steps = [after - before for before, after in pairwise(marks[1:])]
    return max(statistics.median(steps), 1e-9), evaluation


def _announce(sentence: str, verb: str, options: VerbOptions, console: Console) -> None:
    """What comes now, and the command that does the same."""
    console.print(sentence, soft_wrap=True, markup=False)
    console.print(Text(f"  {command_line(verb, options)}", style="dim"), soft_wrap=True)
