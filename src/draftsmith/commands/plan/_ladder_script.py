"""The commands of a ladder: pre-train, collect, distil, measure, check; as they are typed.

OUT/SIZE-pretrained, SIZE-distilled   drafts            OUT/observations   perplexities, acceptance
OUT/store                             trajectories      OUT/SIZE-bench     speed, at its own length
OUT/check                             predicted and measured

What the plan was not told stands there as a variable of the shell, which the script asks for.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.commands._options import VerbOptions
from draftsmith.commands.bench import BenchOptions
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.commands.plan.check import PlanCheckOptions
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import to_argv
from draftsmith.data.text import TextConfig
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.model_sizes import PRESETS, Preset
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.commands.plan.ladder import PlanLadderOptions
    from draftsmith.plan.ladder import Ladder, Rung

VARIABLES = {
    "$TARGET": "folder or hub id of the target",
    "$TEXT": "what to pre-train on: a file, a folder or a pattern",
    "$EVAL_TEXT": "held-out text to measure perplexities on",
    "$PROMPTS": "file of prompts to distil on",
    "$SUITE": "file of prompts to measure on",
}
KINDS = ("pretrained", "distilled")
_LENGTHS = "1..9"
_USUAL = ScheduleConfig()
_STEPS, _WARMUP = 1000, 0.1
"""A pre-training should have so many steps, and warm up for this share of them at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One line of the script."""

    verb: str
    options: VerbOptions
    made: Path | None = None
    """A file that it writes last: where that is there, the line has nothing to do."""

    @property
    def text(self) -> str:
        words = ["draftsmith", *self.verb.split(), *to_argv(self.options)]
        return " ".join(f'"{word}"' if word in VARIABLES else shlex.quote(word) for word in words)


def draft_folder(out: Path, size: str, kind: str) -> Path:
    """Where a draft of this size and kind lies."""
    return out / f"{size}-{kind}"


def commands(
    options: PlanLadderOptions,
    found: Ladder,
    shapes: Mapping[str, Preset],
    context: int | None,
) -> list[Command]:
    """All of them, in their order; `shapes`: of the rungs, by name; `context`: of the target, where
    it is known."""
    out, target = options.out, options.target or "$TARGET"
    suite = options.suite or "$SUITE"
    model = ModelConfig(target=target)
    store = out / "store"
    collect = CollectOptions(model=model, prompts=options.prompts or Path("$PROMPTS"), out=store)
    made = [Command(verb="collect", options=collect, made=store / "run.json")]
    for rung in found.rungs:
        architecture = architecture_of(rung.size, shapes[rung.size], target)
        made += _train(options, rung, architecture, store, context)
    drafts = [[str(draft_folder(out, rung.size, kind)) for kind in KINDS] for rung in found.rungs]
    observe = BenchOptions(
        model=model,
        drafter=",".join(name for both in drafts for name in both),
        suite=suite,
        perplexity=options.eval_text or ("$EVAL_TEXT",),
        drafting=DraftingConfig(draft_length=_LENGTHS),
        temperature="0",
        out=out / "observations",
    )
    benches = [
        BenchOptions(
            model=model,
            drafter=",".join(both),
            suite=suite,
            drafting=DraftingConfig(draft_length=rung.gamma),
            temperature="0",
            out=out / f"{rung.size}-bench",
        )
        for rung, both in zip(found.rungs, drafts, strict=True)
    ]
    measured = [observe, *benches]
    made += [Command(verb="bench", options=one, made=one.out / "run.json") for one in measured]
    check = PlanCheckOptions(
        predictions=out / "ladder.json",
        records=tuple(one.out for one in measured),
        out=out / "check",
    )
    return [*made, Command(verb="plan check", options=check)]


def script(made: Sequence[Command], title: str) -> str:
    """For a POSIX shell. It may be interrupted and run again."""
    lines = ["#!/bin/sh", f"# {title}", "set -eu"]
    texts = [one.text for one in made]
    for variable, meaning in VARIABLES.items():
        if any(f'"{variable}"' in text for text in texts):
            name = variable.removeprefix("$")
            lines.append(f': "${{{name}:?{meaning}}}"')
    for one, text in zip(made, texts, strict=True):
        done = "" if one.made is None else f"[ -e {shlex.quote(str(one.made))} ] ||\n"
        lines += ["", f"{done}{text}"]
    return "\n".join(lines) + "\n"


def architecture_of(name: str, shape: Preset, target: str) -> ArchitectureConfig:
    """By --size where that says it all, else dimension by dimension."""
    size: Any = name
    if size in PRESETS:
        return ArchitectureConfig(size=size, tokenizer=target)
    return ArchitectureConfig(
        layers=shape.layers,
        heads=shape.heads,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        tokenizer=target,
    )


def _train(
    options: PlanLadderOptions,
    rung: Rung,
    architecture: ArchitectureConfig,
    store: Path,
    context: int | None,
) -> list[Command]:
    target = architecture.tokenizer
    assert target is not None, "a draft speaks the target's language"
    pretrained, distilled = (draft_folder(options.out, rung.size, kind) for kind in KINDS)
    pretrain = PretrainOptions(
        data=TextConfig(text=options.text or ("$TEXT",), eval_text=options.eval_text),
        model=architecture,
        training=_schedule(round(rung.tokens), rung.params, context),
        out=pretrained,
    )
    distill = DistillOptions(target=target, drafter=str(pretrained), store=(store,), out=distilled)
    return [
        Command(verb="pretrain", options=pretrain, made=pretrained / "run.json"),
        Command(verb="distill", options=distill, made=distilled / "run.json"),
    ]


def _schedule(tokens: int, params: float, context: int | None) -> ScheduleConfig:
    """As usual; with smaller steps where the usual ones would be few, and a higher rate below some
    6 B parameters: 0.003239 - 0.0001395 ln N (Kaplan et al., arXiv 2001.08361, appendix D.6, where
    N leaves embeddings out; a factor of two in N is 1e-4 here).

    Raises:
        InputError: the tokens are less than one step.
    """
    block, batch = _USUAL.block_length, _USUAL.batch_tokens
    while context is not None and block > max(context, 2):
        block //= 2  # powers of two, so that blocks divide a batch
    while batch > block and tokens < _STEPS * batch:
        batch //= 2
    if tokens < batch:
        raise InputError(
            f"{tokens} tokens for a draft are less than one step of {batch}: give a larger budget"
        )
    rate = 0.003239 - 0.0001395 * math.log(params)
    return ScheduleConfig(
        duration=f"{tokens}tokens",
        block_length=block,
        batch_tokens=batch,
        learning_rate=max(_USUAL.learning_rate, float(f"{rate:.2g}")),
        warmup=min(_USUAL.warmup, int(_WARMUP * tokens / batch)),
    )
