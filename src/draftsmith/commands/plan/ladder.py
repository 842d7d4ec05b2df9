"""`draftsmith plan ladder`: from a budget to drafts to train, with commands and predictions.

OUT/ladder.json   sizes, predictions with intervals, commands: what `plan check` reads
OUT/ladder.sh     the commands, to run as they stand: pre-train, collect, distil, measure, check

The commands write

OUT/SIZE-pretrained, SIZE-distilled   drafts            OUT/observations   perplexities, acceptance
OUT/store                             trajectories      OUT/SIZE-bench     speed, at its own length
OUT/check                             predicted and measured

What the plan was not told stands in the script as a variable of the shell, which it asks for.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.commands._options import LawsOptions, VerbOptions, holds_out
from draftsmith.commands._tables import (
    extrapolated,
    finish,
    interval,
    laws_of,
    say,
    show,
    show_values,
    with_spread,
)
from draftsmith.commands.bench import BenchOptions
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.commands.plan.check import PlanCheckOptions
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.config import each_at_least, parse_count, positive, require, to_argv, unused
from draftsmith.data.text import TextConfig
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.distill.model_sizes import (
    FAMILIES,
    PRESETS,
    Config,
    Preset,
    count_parameters,
    dimension,
    read_config,
    resized,
    shape_for,
)
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import InputError
from draftsmith.provenance import recorded, start_run, write_text_atomic
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.plan.ladder import Ladder
    from draftsmith.plan.optimum import TokenBudget


VARIABLES = {
    "$TARGET": "folder or hub id of the target",
    "$TEXT": "what to pre-train on: a file, a folder or a pattern",
    "$EVAL_TEXT": "held-out text to measure perplexities on",
    "$PROMPTS": "file of prompts to distil on",
    "$SUITE": "file of prompts to measure on",
}
_SETTING = ("target_params", "target_tokens", "target_ppl", "law", "loss", "cost_floor")
KINDS = ("pretrained", "distilled")
_LENGTHS = "1..9"
_USUAL = ScheduleConfig()
_STEPS, _WARMUP = 1000, 0.1
"""A pre-training should have so many steps, and warm up for this share of them at most."""


@dataclass(frozen=True, kw_only=True)
class PlanLadderOptions(VerbOptions):
    """Say which draft sizes to train for a budget: commands, and predictions to check later."""

    target: str | None = None
    """Folder of the target, whose config.json is read; or a hub id, with --target-params."""
    target_params: str | None = None
    """Parameters of the target: 1.3e10 or 13B (K, M, B, T); left out: counted in config.json."""
    target_tokens: str | None = None
    """Tokens that it was trained on; left out: what `pretrain` wrote beside it."""
    vocab_size: int = 32_000
    """Without a folder: size of its vocabulary, which drafts share."""
    tokens: str | None = None
    """Budget: tokens to pre-train each draft on, such as 2B."""
    flops: str | None = None
    """Budget: operations to pre-train each draft with, such as 1e18: six per weight and token."""
    hours: float | None = None
    """Budget, with --tokens-per-second: time to pre-train each draft."""
    tokens_per_second: float | None = None
    """With --hours: the rate of training, taken to be the same for every size."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    cost_floor: float | None = None
    """Measured seconds of a pass of a small draft over those of a target pass: no size is taken to
    cost less than this."""
    text: tuple[str, ...] = ()
    """What to pre-train on, as for `pretrain`; left out: ladder.sh asks for it."""
    eval_text: tuple[str, ...] = ()
    """Held-out text to measure perplexities on; left out: ladder.sh asks for it."""
    prompts: Path | None = None
    """Prompts to distil on; left out: ladder.sh asks for them."""
    suite: str | None = None
    """Prompts to measure on; left out: ladder.sh asks for them."""
    out: Path = Path("runs/ladder")
    """Folder for ladder.json and ladder.sh, and of what that makes."""

    def validate(self) -> None:
        super().validate()
        budgets = (self.tokens, self.flops, self.hours)
        require(budgets.count(None) == 2, "give one budget: --tokens, --flops or --hours")
        if self.hours is None:
            unused("--tokens-per-second", self.tokens_per_second, None, "--hours")
        elif self.tokens_per_second is None:
            raise InputError("--hours needs --tokens-per-second: the rate at which drafts train")
        require(
            self.target is not None or self.target_params is not None,
            "give --target FOLDER, or --target-params and --target-tokens",
        )
        for name in ("tokens", "flops", "target_params", "target_tokens"):
            if getattr(self, name) is not None:
                parse_count(getattr(self, name), f"--{name.replace('_', '-')}")
        for name in ("hours", "tokens_per_second", "cost_floor"):
            positive(f"--{name.replace('_', '-')}", getattr(self, name))
        each_at_least(1, self, "vocab_size")
        require("," not in str(self.out), f"--out must not hold a comma, got {self.out}")


@holds_out
def run(options: PlanLadderOptions) -> dict[str, Any]:
    """Solve, print, write."""
    from draftsmith.plan.ladder import ladder
    from draftsmith.plan.optimum import SizingProblem

    record = start_run("plan ladder", options, out=options.out)
    guesses: list[str] = []
    config, target_params = read_target(options, guesses)
    law, loss = laws_of(options.laws)
    setting = SizingProblem(
        target_params=target_params,
        target_tokens=_training_tokens(options),
        budget=budget_of(options),
        law=with_spread(law, options.laws),
        loss=loss,
        cost_floor=options.cost_floor or 0.0,
    )
    shapes: dict[str, Preset] = dict(PRESETS.items())

    def params_of(shape: Preset) -> float:
        return float(count_parameters(resized(config, shape), f"a draft of {shape.name}"))

    def build(params: float) -> tuple[str, float]:
        shape = shape_for(config, params)
        shapes[shape.name] = shape
        return shape.name, params_of(shape)

    found = ladder(setting, {name: params_of(shape) for name, shape in PRESETS.items()}, build)
    context = None
    if config.get("max_position_embeddings") is not None:
        context = dimension(config, "max_position_embeddings", "config.json of the target")
    made = {} if found.recommended is None else commands(options, found, shapes, context)
    warnings = [*extrapolated(law, target_params), *guesses, *found.warnings]
    if setting.law.cov is None or setting.law.residual is None:
        warnings.append(
            "there are no intervals: the errors of the coefficients are not known; give them with "
            "--law (from `plan law`), or install draftsmith[plan] for those of the paper"
        )
    unit = "tokens" if options.flops is None else "flops"
    rungs: list[dict[str, Any]] = [
        {
            **asdict(rung),
            "shape": shapes[rung.size],
            "recommended": place == found.recommended,
            "drafts": {kind: str(draft_folder(options.out, rung.size, kind)) for kind in KINDS},
        }
        for place, rung in enumerate(found.rungs)
    ]
    if made:
        path = options.out / "ladder.sh"
        write_text_atomic(path, script(made))
        path.chmod(0o755)
    _show(found)
    say(warnings)
    plan = {
        "target": options.target,
        **{name: getattr(setting, name) for name in _SETTING},
        "budget": {"tokens": None, "flops": None, unit: setting.budget.amount},
        "n_opt": found.best_params,
        "ci95": found.ci95,
        "rungs": rungs,
        "commands": list(made.values()),
        "warnings": warnings,
    }
    return finish(record, options.out, plan, name="ladder.json")


def read_target(options: PlanLadderOptions, notes: list[str]) -> tuple[Config, float]:
    """Return the configuration in whose family drafts are made, and the target's parameters. Where
    the family is a guess, say so in `notes`.

    Raises:
        InputError: neither the options nor the folder give the parameters.
    """
    given = options.target_params
    params = None if given is None else parse_count(given, "--target-params")
    if options.target is None or not Path(options.target).is_dir():
        if params is None:
            raise InputError(
                f"--target {options.target} is no folder here: give --target-params and "
                "--target-tokens, too"
            )
        notes.append(
            f"sizes of drafts are those of Llama with a vocabulary of {options.vocab_size} "
            "(--vocab-size): a target's folder would tell"
        )
        vocabulary = {"vocab_size": options.vocab_size, "tie_word_embeddings": True}
        return {"model_type": "llama", **vocabulary}, params
    config = read_config(Path(options.target))
    if params is None:
        params = float(count_parameters(config, str(Path(options.target) / "config.json")))
    kind = config.get("model_type")
    if kind not in FAMILIES:
        notes.append(f"sizes of drafts are those of Llama: {kind!r} is not known here")
        config["model_type"] = "llama"
    return config, params


def budget_of(options: PlanLadderOptions) -> TokenBudget:
    from draftsmith.plan.optimum import FlopBudget, TokenBudget

    if options.flops is not None:
        return FlopBudget(amount=parse_count(options.flops, "--flops"), name="--flops")
    if options.tokens is not None:
        return TokenBudget(amount=parse_count(options.tokens, "--tokens"), name="--tokens")
    seconds = 3600.0 * (options.hours or 0.0)
    amount = seconds * (options.tokens_per_second or 0.0)
    return TokenBudget(amount=amount, name="--hours x --tokens-per-second")


# --------------------------------------------------------------------------- inside


def _training_tokens(options: PlanLadderOptions) -> float:
    """Return those of the target, by the options or by the run.json beside its config.json."""
    if options.target_tokens is not None:
        return parse_count(options.target_tokens, "--target-tokens")
    known = options.target and recorded(Path(options.target, "run.json"), "results", "tokens")
    if not known:
        raise InputError(
            "give --target-tokens: the number of tokens that the target was trained on is not known"
        )
    return parse_count(str(known), "results.tokens in the target's run.json")


def _show(found: Ladder) -> None:
    sizes = "nothing"
    if found.recommended is not None:
        sizes = ", ".join(rung.size for rung in found.rungs)
    best = {"best draft size N*": found.best_params, "95 %": interval(found.ci95)}
    show_values("", {**best, "to train": sizes})
    show(
        "Drafts, and what to expect of them before they are distilled",
        ("size", "parameters", "tokens", "acceptance", "draft length", "tokens/step", "speed-up"),
        [
            (
                rung.size + (" *" if place == found.recommended else ""),
                rung.params,
                rung.tokens,
                rung.alpha.text(),
                rung.gamma,
                rung.tau.text(),
                rung.speedup.text(),
            )
            for place, rung in enumerate(found.rungs)
        ],
    )


# --------------------------------------------------------------------------- the script


def draft_folder(out: Path, size: str, kind: str) -> Path:
    """Return the folder of a draft of this size and kind."""
    return out / f"{size}-{kind}"


def commands(
    options: PlanLadderOptions, found: Ladder, shapes: Mapping[str, Preset], context: int | None
) -> dict[Path, str]:
    """Return all commands in order, by the folder that each writes; `shapes`: of the rungs, by
    name; `context`: of the target, where it is known."""
    out, target = options.out, options.target or "$TARGET"
    model, suite = ModelConfig(target=target), options.suite or "$SUITE"
    prompts, store = options.prompts or Path("$PROMPTS"), out / "store"
    made = {store: _line("collect", CollectOptions(model=model, prompts=prompts, out=store))}
    observe = BenchOptions(
        model=model,
        drafter="",
        suite=suite,
        perplexity=options.eval_text or ("$EVAL_TEXT",),
        drafting=DraftingConfig(draft_length=_LENGTHS),
        temperature="0",
        out=out / "observations",
    )
    drafts: list[str] = []
    benches: list[BenchOptions] = []
    for rung in found.rungs:
        pretrained, distilled = (draft_folder(out, rung.size, kind) for kind in KINDS)
        pretrain = PretrainOptions(
            data=TextConfig(text=options.text or ("$TEXT",), eval_text=options.eval_text),
            model=architecture_of(rung.size, shapes[rung.size], target),
            training=_schedule(round(rung.tokens), rung.params, context),
            out=pretrained,
        )
        distill = DistillOptions(
            target=target, drafter=str(pretrained), store=(store,), out=distilled
        )
        made |= {pretrained: _line("pretrain", pretrain), distilled: _line("distill", distill)}
        own = [str(pretrained), str(distilled)]
        drafts += own
        bench = replace(
            observe,
            drafter=",".join(own),
            perplexity=(),
            drafting=DraftingConfig(draft_length=rung.gamma),
            out=out / f"{rung.size}-bench",
        )
        benches.append(bench)
    benches.insert(0, replace(observe, drafter=",".join(drafts)))
    made |= {one.out: _line("bench", one) for one in benches}
    check = PlanCheckOptions(
        predictions=out / "ladder.json",
        records=tuple(one.out for one in benches),
        out=out / "check",
    )
    return {**made, out / "check": _line("plan check", check)}


def _line(verb: str, options: VerbOptions) -> str:
    words = ["draftsmith", *verb.split(), *to_argv(options)]
    return " ".join(f'"{word}"' if word in VARIABLES else shlex.quote(word) for word in words)


def script(made: Mapping[Path, str]) -> str:
    """Write the commands for a POSIX shell; the script may be interrupted and run again, the last
    of them runs every time."""
    title = "made by `draftsmith plan ladder`; it may be interrupted and run again"
    asked = [
        f': "${{{variable.removeprefix("$")}:?{meaning}}}"'
        for variable, meaning in VARIABLES.items()
        if any(f'"{variable}"' in line for line in made.values())
    ]
    *before, last = made.values()
    files = (shlex.quote(str(folder / "run.json")) for folder in made)
    lines = [f"\n[ -e {file} ] ||\n{line}" for file, line in zip(files, before, strict=False)]
    return "\n".join(["#!/bin/sh", f"# {title}", "set -eu", *asked, *lines, f"\n{last}\n"])


def architecture_of(name: str, shape: Preset, target: str) -> ArchitectureConfig:
    """Describe a draft by --size where that says it all, else dimension by dimension."""
    size: Any = name
    if size in PRESETS:
        return ArchitectureConfig(size=size, tokenizer=target)
    return ArchitectureConfig(**asdict(shape), tokenizer=target)


def _schedule(tokens: int, params: float, context: int | None) -> ScheduleConfig:
    """Return the usual schedule, with smaller steps where they would be few, and a higher rate
    below some 6 B parameters: 0.003239 - 0.0001395 ln N (Kaplan et al., arXiv 2001.08361, appendix
    D.6, where N leaves embeddings out; a factor of two in N is 1e-4 here).

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
