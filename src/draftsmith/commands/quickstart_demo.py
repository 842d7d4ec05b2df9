"""The script of `draftsmith quickstart`: show, compare, collect, distil, gain.

`find_changes` compares a draft model before and after a distillation, on held-out prompts:

alpha               computed from the laws of both models at every place of the target's own
                    texts: no noise but that of the choice of texts
tokens per step     decoded
speed-up            over plain decoding; it and both draft models run interleaved
after / before      seconds per token of the old draft model over those of the new one, with a
                    bootstrap interval over prompts: a gain is claimed only if 1 lies outside

`collect` and `distil` run the ordinary verbs for about so many seconds each. A store is named by
its prompts, and a learning rate follows the number of steps, so both amounts are fixed before: each
begins with a short trial that is thrown away.

    trial: one batch, a few tokens     seconds a text     -> so many prompts    `draftsmith collect`
    trial: a few steps on a copy       seconds a step     -> so many steps      `draftsmith distill`
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.bench.arms import open_drafters
from draftsmith.bench.costs import ForwardProbe
from draftsmith.bench.records import (
    BASELINE,
    DrafterMetrics,
    Interval,
    RunRecord,
    bootstrap_interval,
    drafter_metrics,
    paired_paces,
    weighted_speedup,
)
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.bench.summary import (
    BenchReport,
    Section,
    interval_text,
    losslessness_sentences,
    number,
    speed_sentences,
    summary,
    terminal_table,
    times,
    write_report,
)
from draftsmith.commands import bench as bench_verb
from draftsmith.commands import collect as collect_verb
from draftsmith.commands import distill as distill_verb
from draftsmith.commands._options import VerbOptions
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.commands.generate import DRAFTED, Stream
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm, encode
from draftsmith.core.sampling import Sampler
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import held_out_prompts, training_prompts
from draftsmith.distill import tokenizer_training
from draftsmith.distill.acceptance import measure_acceptance
from draftsmith.distill.checkpoint import work_folder
from draftsmith.distill.config import KeptConfig, ScaleConfig, ScheduleConfig
from draftsmith.distill.distilling import make_lesson, make_trainer
from draftsmith.distill.distributed import start_accelerator
from draftsmith.distill.students import open_student
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import (
    Run,
    append_jsonl,
    command_line,
    jsonable,
    portable_text,
    refuse_file,
    start_run,
    warn_if_busy,
    write_json_atomic,
)
from draftsmith.targets.base import Target
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_model

BEFORE, AFTER = "shipped draft", "distilled draft"
"""What the two arms are called."""
DRAFT_LENGTH: Literal["adaptive"] = "adaptive"
"""As for --draft-length: a fixed length would suit one of the two better than the other."""
LEAST_GAIN = 0.001
"""The smallest gain of alpha that counts: what the table rounds away is none."""

Texts = Mapping[float, Sequence[Trajectory]]
"""What the target said, by temperature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A draft model at one temperature."""

    alpha: float
    """Expected acceptance of a drafted token."""
    tokens_per_step: float | None
    speedup: float | None
    """Over plain decoding."""
    speedup_ci95: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Before and after at one temperature."""

    temperature: float
    before: Side
    after: Side
    ratio: float | None
    """Speed after / speed before."""
    ratio_ci95: Interval | None
    same_tokens: bool | None
    """At temperature 0: both said what plain decoding says."""

    @property
    def accepted(self) -> str:
        """How often, in words."""
        gain = self.after.alpha - self.before.alpha
        if abs(gain) < LEAST_GAIN:
            return "no more often"
        return "more often" if gain > 0 else "less often"

    @property
    def fast(self) -> str:
        """How fast, in words; what lies within the noise is no gain."""
        interval = self.ratio_ci95
        if interval is not None and interval.low > 1:
            return "faster"
        slower = interval is not None and interval.high < 1
        return "slower" if slower else "not measurably faster"


# --------------------------------------------------------------------------- measuring


def target_texts(
    target: Target,
    items: Iterable[Item],
    samplers: Iterable[Sampler],
    *,
    max_new_tokens: int,
    seed: int,
) -> dict[float, tuple[Trajectory, ...]]:
    """What the target says to these prompts, by temperature."""
    requests = [CollectRequest(prompt_id=item.prompt, prompt=item.tokens) for item in items]
    settings = CollectSettings(
        forcing="sample",
        temperatures=tuple(sampler.temperature for sampler in samplers),
        max_new_tokens=max_new_tokens,
        top_k=1,  # whole laws are read when they are compared
        seed=seed,
    )
    made = TransformersBackend(target).collect(requests, settings)
    return {
        temperature: tuple(text for text in made if text.temperature == temperature)
        for temperature in settings.temperatures
    }


def alphas(target: Target, draft: Path, texts: Texts) -> dict[float, float]:
    """The draft model's expected acceptance on these texts, by temperature.

    Raises:
        BackendError: the folder holds no model that can be loaded.
    """
    dtype: Any = str(target.dtype).removeprefix("torch.")
    model = open_model(ModelConfig(target=str(draft), dtype=dtype, device=str(target.device)))
    return {
        temperature: measure_acceptance(target, model, some, Sampler(temperature=temperature)).alpha
        for temperature, some in texts.items()
    }


def find_changes(
    records: Sequence[RunRecord], before: Mapping[float, float], after: Mapping[float, float]
) -> tuple[Change, ...]:
    """Put together: records of plain decoding, BEFORE and AFTER; alphas by temperature."""
    found = {(entry.name, entry.temperature): entry for entry in drafter_metrics(records)}

    def side(name: str, temperature: float, alpha: float) -> Side:
        entry: DrafterMetrics = found[name, temperature]
        return Side(
            alpha=alpha,
            tokens_per_step=entry.tokens_per_step,
            speedup=entry.speedup,
            speedup_ci95=entry.speedup_ci95,
        )

    def change(temperature: float) -> Change:
        old, new = (
            [r for r in records if (r.drafter, r.temperature) == (name, temperature)]
            for name in (BEFORE, AFTER)
        )
        paces = paired_paces(old, new)
        same = [found[name, temperature].identical_to_autoregressive for name in (BEFORE, AFTER)]
        return Change(
            temperature=temperature,
            before=side(BEFORE, temperature, before[temperature]),
            after=side(AFTER, temperature, after[temperature]),
            ratio=weighted_speedup(paces),
            ratio_ci95=bootstrap_interval(paces),
            same_tokens=None if None in same else all(same),
        )

    return tuple(change(t) for name, t in found if name == BASELINE)


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
"""Evaluations on held-out prompts, the last step's included; the best weights are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What the target said."""

    store: Path
    prompts: int
    trajectories: int
    tokens: int
    """Tokens of the continuations."""
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
        model=ModelConfig(target=source),
        prompts=path,
        out=folder / "store",
        samples=1,
        temperatures=",".join(f"{temperature:g}" for temperature in temperatures),
        kept=KeptConfig(top_k=min(TOP_K, target.vocab_size)),
        max_new_tokens=max_new_tokens,
        batch_size=BATCH,
        scale=ScaleConfig(shard_size=BATCH),
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
    made = collect_verb.run(options)
    return Collected(
        store=options.out,
        prompts=len(chosen),
        trajectories=made["trajectories"],
        tokens=made["tokens"],
        seconds=time.monotonic() - began,
    )


def seconds_per_text(
    target: Target, prompts: tuple[Prompt, ...], max_new_tokens: int, seed: int
) -> float:
    """Estimate the seconds of continuing a batch like these, from a few steps: a forward over the
    prompts, and one step per further token."""
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
        training=ScheduleConfig(
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
    made = distill_verb.run(options)
    return Distilled(
        draft=options.out, steps=made.steps, tokens=made.tokens, seconds=time.monotonic() - began
    )


def block_length(store: Path) -> int:
    """Room for the longest text of a store and the separator behind it."""
    texts = TrajectoryStore.open(store).trajectories()
    longest = max(len(text.prompt) + len(text.tokens) + 1 for text in texts)
    return BLOCK_MULTIPLE * math.ceil(longest / BLOCK_MULTIPLE)


def seconds_per_step(options: DistillOptions) -> tuple[float, float]:
    """Measure the seconds of a step and of an evaluation on a copy of the draft model."""
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    student = open_student(options, tokenizer)
    accelerator = start_accelerator(options)
    with work_folder(options.out):
        lesson = make_lesson(options, tokenizer, student, None)
        trainer = make_trainer(options, student, lesson, TRIAL_STEPS, accelerator)
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


SMALL = Path("models/mini-code")
_ROOT = Path(__file__).resolve().parents[3]
"""The folder of a checkout; for a wheel, some folder that holds no such models."""
DISTILLED = "distilled"
"""Folder in OUT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What is there before anything is measured."""

    options: QuickstartOptions
    console: Console
    began: float
    """On the steady clock."""
    models: Path
    target: HFTarget
    draft: Arm
    """The shipped draft model."""
    rivals: tuple[Arm, ...]
    """Drafters without a model."""
    items: tuple[Item, ...]
    """Held-out prompts."""
    samplers: tuple[Sampler, ...]

    @property
    def source(self) -> str:
        """The target's folder."""
        return str(self.models / "target")

    @property
    def folder(self) -> Path:
        """For what is collected and distilled."""
        return self.options.out / DISTILLED


def set_scene(options: QuickstartOptions, num_prompts: int) -> Scene:
    """Load everything; with `num_prompts` prompts unless the user limits them.

    Raises:
        InputError: an --out that is used for something else, or no prompts on this machine.
        BackendError: models that are missing or damaged.
    """
    began = time.monotonic()
    models = find_models(options.models)
    check_out(options.out)
    prompts = held_out_prompts(options.limit or num_prompts)
    target = open_model(ModelConfig(target=str(models / "target")))
    return Scene(
        options=options,
        console=Console(highlight=False),
        began=began,
        models=models,
        target=target,
        draft=open_draft(models / "draft", target),
        rivals=open_drafters(("prompt_lookup", "lookahead"), DraftingConfig(), target),
        items=tuple(Item(prompt=p.id, tokens=encode(p, target)) for p in prompts),
        samplers=tuple(Sampler(temperature=t) for t in options.temperatures()),
    )


def open_draft(folder: Path, target: HFTarget) -> Arm:
    """A draft model that drafts as far as pays, which the distilled one may do further."""
    drafting = DraftingConfig(draft_length=DRAFT_LENGTH)
    (arm,) = open_drafters((f"independent:{folder}",), drafting, target)
    return arm


def choose_threads(scene: Scene) -> None:
    """Use one thread where several are slower: beside other programs they wait for each other."""
    many = torch.get_num_threads()
    if many == 1 or scene.target.device.type != "cpu":
        return
    probe = ForwardProbe(scene.target, scene.items[0].tokens, 1)
    seconds = {}
    for threads in (many, 1):
        torch.set_num_threads(threads)
        seconds[threads] = statistics.median([probe.seconds(1) for _ in range(9)])
    if seconds[1] > 0.8 * seconds[many]:
        torch.set_num_threads(many)
        return
    scene.console.print(f"One thread is faster than {many} here: using one.", style="dim")


# --------------------------------------------------------------------------- folders


def find_models(given: Path | None) -> Path:
    """The folder with `target` and `draft`.

    Raises:
        BackendError: it is not where it should be.
    """
    places = [given] if given is not None else [_ROOT / SMALL, SMALL]
    for place in places:
        if (place / "target" / "config.json").is_file() and (place / "draft").is_dir():
            here = Path.cwd()
            return place.relative_to(here) if place.is_relative_to(here) else place
    if given is not None:
        raise BackendError(f"--models {given} has no folders target and draft with models.")
    raise BackendError(
        "The small models are not here: they are in the folder models/mini-code of draftsmith's "
        "repository; run this from a checkout, or give the folder by --models."
    )


def check_out(out: Path) -> None:
    """InputError when `out` is a file or holds what no quickstart made."""
    refuse_file(out)
    if not (out / "records.jsonl").exists():
        if (out / DISTILLED).exists():
            raise InputError(
                f"--out {out} holds a folder {DISTILLED!r} that no quickstart made; give another."
            )
        return
    try:
        verb = json.loads((out / "run.json").read_text(encoding="utf-8"))["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = "quickstart"  # interrupted: it never came to its run.json
    if verb != "quickstart":
        raise InputError(f"--out {out} holds a measurement by `draftsmith {verb}`; give another.")


def clear(out: Path) -> None:
    """Make room for a new quickstart. records.jsonl goes last: it says that the rest is ours."""
    (out / "run.json").unlink(missing_ok=True)
    for name in ("report.html", "summary.json"):
        (out / name).unlink(missing_ok=True)
    for name in ("figures", DISTILLED):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "records.jsonl").unlink(missing_ok=True)


FEWEST_MEASURED_PROMPTS = 3
FEWEST_TOKENS = 24
FEWEST_REPEATED = 4
"""Fewer prompts than this are not worth repeating."""
MOST_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much to measure."""

    prompts: int
    repeats: int
    tokens: int
    """New ones for each prompt."""


def choose_amount(seconds: float, *, each: float, prompts: int, tokens: int) -> Amount:
    """Three repeats of as many prompts as fit into `seconds`, so that a median can drop a stall of
    the machine; else one repeat of as many as fit; on the slowest machines shorter texts too.

    `each`: seconds of one prompt with everybody.
    """
    rounds = int(seconds / max(each, 1e-9))
    if rounds >= MOST_REPEATS * min(prompts, FEWEST_REPEATED):
        fitting = min(prompts, rounds // MOST_REPEATS)
        return Amount(prompts=fitting, repeats=MOST_REPEATS, tokens=tokens)
    fewest = min(prompts, FEWEST_MEASURED_PROMPTS)
    if rounds >= fewest:
        return Amount(prompts=min(prompts, rounds), repeats=1, tokens=tokens)
    share = seconds / (each * fewest)
    return Amount(
        prompts=fewest, repeats=1, tokens=min(tokens, max(FEWEST_TOKENS, int(share * tokens)))
    )


def settle_amount(bench: Bench, seconds: float, console: Console) -> None:
    """Have the measurement take about so many seconds: after its warm-up it is known how long a
    prompt takes, so the plan is cut to what fits, and printed."""

    def settle(each: float) -> None:
        plan = bench.plan
        amount = choose_amount(
            seconds, each=each, prompts=len(plan.items), tokens=plan.max_new_tokens
        )
        bench.plan = replace(
            plan,
            items=plan.items[: amount.prompts],
            repeats=amount.repeats,
            max_new_tokens=amount.tokens,
        )
        share = amount.tokens / plan.max_new_tokens
        temperatures = " and ".join(f"{sampler.temperature:g}" for sampler in plan.samplers)
        often = {1: "once", 2: "twice"}.get(amount.repeats, f"{amount.repeats} times")
        console.print(
            f"Measuring {len(plan.arm_names(plan.samplers[0]))} ways to continue {amount.prompts} "
            f"prompts by {amount.tokens} tokens at temperature {temperatures}, {often}, "
            f"interleaved: about {each * amount.prompts * amount.repeats * share:.0f} s.",
            soft_wrap=True,
        )

    bench.on_prepared = settle


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All that is to be told of a distillation."""

    draft: str
    """Folder of the draft model that it began with."""
    collected: Collected
    distilled: Distilled
    changes: tuple[Change, ...]
    prompts: int
    """That were decoded."""
    texts: int
    """Texts of the target, at each temperature, that alpha was computed on."""
    equality: tuple[str, ...]
    """Sentences on whether the target's text stayed the same."""

    @property
    def sentence(self) -> str:
        """What happened, in one sentence; it never says more than was measured."""
        accepted = _by_temperature((c.temperature, c.accepted) for c in self.changes)
        fast = _by_temperature((c.temperature, c.fast) for c in self.changes)
        better = any(c.accepted == "more often" or c.fast == "faster" for c in self.changes)
        said = "is" if better else "is no better: it is"
        return (
            f"After {self.distilled.seconds:.0f} s of distillation on {self.collected.tokens:,} "
            f"tokens of the target the draft model {said} accepted {accepted} than before, and "
            f"decoding with it is {fast}."
        )

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """(temperature, figure, before, after, gain)."""
        return tuple(row for change in self.changes for row in _rows(change))

    def table(self) -> Table:
        """For the terminal."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("")
        for name in ("before", "after", "gain"):
            table.add_column(name, justify="right", no_wrap=True)
        known = None
        for temperature, *cells in self.rows:
            if temperature != known:
                table.add_section()
                table.add_row(f"temperature {temperature}", style="italic")
                known = temperature
            table.add_row(*cells)
        return table

    @property
    def section(self) -> Section:
        """For the page."""
        return Section(
            title="Before and after distillation",
            sentences=(self.sentence, self.method, *self.equality),
            columns=("temperature", "figure", "before", "after", "gain"),
            rows=self.rows,
        )

    @property
    def method(self) -> str:
        """How it was measured."""
        return (
            f"Both draft models draft with --draft-length {DRAFT_LENGTH}: two tokens more after a "
            "draft that was accepted whole, one less after any other. Alpha is computed on "
            f"{_count(self.texts, 'text')} of the target at each temperature; the rest is measured "
            f"on {_count(self.prompts, 'prompt')}, decoded with both and plainly, interleaved. "
            "These prompts are from files that nothing was collected from, and that "
            "models/mini-code was not trained on."
        )

    def payload(self) -> dict[str, Any]:
        """For summary.json: plain values."""
        return {
            "sentence": self.sentence,
            "draft_length": DRAFT_LENGTH,
            "before": portable_text(self.draft),
            "after": portable_text(str(self.distilled.draft)),
            "tokens_collected": self.collected.tokens,
            "trajectories": self.collected.trajectories,
            "training_prompts": self.collected.prompts,
            "collect_seconds": self.collected.seconds,
            "steps": self.distilled.steps,
            "tokens_fed": self.distilled.tokens,
            "distil_seconds": self.distilled.seconds,
            "prompts": self.prompts,
            "texts_of_alpha": self.texts,
            "temperatures": [
                {
                    "temperature": change.temperature,
                    "before": _figures(change.before),
                    "after": _figures(change.after),
                    "speed_ratio": change.ratio,
                    "speed_ratio_ci95": _pair(change.ratio_ci95),
                    "identical_to_autoregressive": change.same_tokens,
                }
                for change in self.changes
            ],
        }


def _rows(change: Change) -> tuple[tuple[str, ...], ...]:
    temperature, before, after = f"{change.temperature:g}", change.before, change.after
    points = f"{100 * (after.alpha - before.alpha):+.1f} points"
    faster = "" if change.ratio is None else f"{100 * (change.ratio - 1):+.0f} %"
    if change.ratio_ci95 is not None:
        faster += f" ({interval_text(change.ratio_ci95)}x)"
    more = ""
    if before.tokens_per_step and after.tokens_per_step:
        more = f"{100 * (after.tokens_per_step / before.tokens_per_step - 1):+.0f} %"
    return (
        (
            temperature,
            "acceptance (alpha)",
            f"{100 * before.alpha:.1f} %",
            f"{100 * after.alpha:.1f} %",
            points,
        ),
        (
            temperature,
            "tokens per step (tau)",
            number(before.tokens_per_step),
            number(after.tokens_per_step),
            more,
        ),
        (temperature, "measured speed-up", times(before.speedup), times(after.speedup), faster),
    )


def _by_temperature(words: Iterable[tuple[float, str]]) -> str:
    """`faster at temperature 0 and no faster at temperature 0.8`."""
    where: dict[str, list[str]] = {}
    for temperature, word in words:
        where.setdefault(word, []).append(f"{temperature:g}")
    return " and ".join(
        f"{word} at temperature {' and '.join(some)}" for word, some in where.items()
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _figures(side: Side) -> dict[str, Any]:
    return {
        "alpha": side.alpha,
        "tokens_per_step": side.tokens_per_step,
        "speedup": side.speedup,
        "speedup_ci95": _pair(side.speedup_ci95),
    }


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


# What may take how long, in seconds. Loading, warming up, cost tables, the texts for alpha and the
# report come on top; the whole should stay under four minutes on two cores.
COMPARE_SECONDS = 50.0
"""The measured rounds of the first comparison."""
COLLECT_SECONDS = 22.0
"""Its trial included."""
DISTIL_SECONDS = 60.0
"""Its trial and evaluations included."""
GAIN_SECONDS = 35.0
"""The measured rounds of before and after; less where the parts before took longer:"""
WHOLE_SECONDS = 220.0
"""By then the last measurement should end."""
SHORTEST_GAIN_SECONDS = 10.0
"""But it is never shorter than this."""

NUM_PROMPTS = 12
"""Held-out ones: as many as fit are decoded; alpha is computed on texts of all."""
COLLECTED_TOKENS = 128
"""Longest text that is learnt from."""

NEXT = (
    "draftsmith collect --target Qwen/Qwen3-4B --prompts prompts.jsonl --samples 2 "
    "--temperatures 0,1 --out runs/my-store",
    "draftsmith distill --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B --store runs/my-store "
    "--out drafts/mine",
    "draftsmith bench --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B,drafts/mine,prompt_lookup "
    "--suite held-out.jsonl --temperature 0,0.8 --out runs/my-bench",
)


def run(options: QuickstartOptions) -> dict[str, Any]:
    """Show, compare, collect, distil, measure the gain; everything goes to `options.out`."""
    record = start_run("quickstart", options, seed=options.seed)
    warn_if_busy()
    scene = set_scene(options, NUM_PROMPTS)
    clear(options.out)  # all that can be missing is there
    choose_threads(scene)
    show(scene)
    comparison = compare(scene, record)
    collected = collect_texts(scene)
    distilled = distil_draft(scene, collected)
    outcome = measure_gain(scene, record, collected, distilled)
    tell(scene, outcome)
    return finish(scene, record, comparison, outcome)


# --------------------------------------------------------------------------- the parts


def show(scene: Scene) -> None:
    """Decode one prompt in front of the reader."""
    target, console, item = scene.target, scene.console, scene.items[0]
    console.print(
        Text.assemble(
            ("Python's own code, continued. ", "bold"),
            ("Coloured", DRAFTED),
            f" tokens were drafted by a model of one layer and accepted by {target.name};"
            " the text is the target's own.\n",
        )
    )
    prompt = target.tokenizer.decode(list(item.tokens), skip_special_tokens=True)
    console.print(Text("".join(prompt.splitlines(keepends=True)[-6:]), style="dim"), end="")
    stream = Stream(target.tokenizer, console)
    decode_options = scene.draft.adapt(
        DecodeOptions(max_new_tokens=scene.options.max_new_tokens, seed=scene.options.seed)
    )
    steps = tokens = 0
    for step in decode(target, scene.draft.drafter, [item.tokens], decode_options):
        stream.add(step.emitted[0], step.accepted[0])
        steps += 1
        tokens += len(step.emitted[0])
    stream.finish()
    console.print(f"\n{tokens} tokens in {steps} forwards of the target\n", style="dim")


def compare(scene: Scene, record: Run) -> BenchReport:
    """All ways to decode, interleaved."""
    say_part(scene, "Compared: drafters without a model, and the draft model that is shipped")
    plan = make_plan(scene, (*scene.rivals, scene.draft))
    report = measure(scene, plan, COMPARE_SECONDS, scene.options.out, record)
    scene.console.print(terminal_table(report))
    for sentence in [*speed_sentences(report), *losslessness_sentences(report)]:
        scene.console.print(sentence, soft_wrap=True, markup=False)
    return report


def collect_texts(scene: Scene) -> Collected:
    """What the target says to code that it was trained on: what is measured stays held out."""
    say_part(
        scene,
        "Collected: what the target says, and its laws: how probable it finds every next token",
    )
    return collect(
        scene.target,
        scene.source,
        training_prompts(),
        scene.folder,
        temperatures=tuple(dict.fromkeys(scene.options.temperatures())),
        seconds=COLLECT_SECONDS,
        max_new_tokens=min(COLLECTED_TOKENS, scene.options.max_new_tokens),
        seed=scene.options.seed,
        console=scene.console,
    )


def distil_draft(scene: Scene, collected: Collected) -> Distilled:
    """A copy of the shipped draft model learns from it."""
    say_part(scene, "Distilled: the draft model learns to say what the target says")
    return distil(
        scene.source,
        str(scene.models / "draft"),
        collected,
        scene.folder,
        seconds=DISTIL_SECONDS,
        seed=scene.options.seed,
        console=scene.console,
    )


def measure_gain(scene: Scene, record: Run, collected: Collected, distilled: Distilled) -> Outcome:
    """The draft model before and after, side by side."""
    say_part(scene, "Before and after")
    shipped = scene.models / "draft"
    texts = target_texts(
        scene.target,
        scene.items,
        scene.samplers,
        max_new_tokens=scene.options.max_new_tokens,
        seed=scene.options.seed,
    )
    before = alphas(scene.target, shipped, texts)
    after = alphas(scene.target, distilled.draft, texts)
    arms = (
        replace(scene.draft, name=BEFORE),
        replace(open_draft(distilled.draft, scene.target), name=AFTER),
    )
    plan = replace(make_plan(scene, arms), with_transformers=False, cost_rounds=0)
    left = WHOLE_SECONDS - (time.monotonic() - scene.began)
    seconds = max(SHORTEST_GAIN_SECONDS, min(GAIN_SECONDS, left))
    report = measure(scene, plan, seconds, scene.folder, record)
    # what holds of any measurement was said below the first one
    above_0 = tuple(entry for entry in report.records if entry.temperature > 0)
    known = losslessness_sentences(replace(report, records=above_0))
    return Outcome(
        draft=str(shipped),
        collected=collected,
        distilled=distilled,
        changes=find_changes(report.records, before, after),
        prompts=report.num_prompts,
        texts=len(scene.items),
        equality=tuple(said for said in losslessness_sentences(report) if said not in known),
    )


def tell(scene: Scene, outcome: Outcome) -> None:
    """What the distillation brought."""
    scene.console.print(outcome.table())
    scene.console.print(Text(outcome.sentence, style="bold"), soft_wrap=True)
    for sentence in (outcome.method, *outcome.equality):
        scene.console.print(sentence, soft_wrap=True, markup=False)


def finish(scene: Scene, record: Run, comparison: BenchReport, outcome: Outcome) -> dict[str, Any]:
    """Write page, figures and, last, run.json; say what comes next."""
    out, console = scene.options.out, scene.console
    report = replace(comparison, sections=(outcome.section,))
    write_report(report, out)
    distillation = outcome.payload()
    content: dict[str, Any] = jsonable({**summary(report), "distillation": distillation})
    write_json_atomic(out / "summary.json", content)
    results = {"records": len(report.records), "distillation": distillation}
    record.write(out, results=results)
    console.print(f"report: {out / 'report.html'}", soft_wrap=True, markup=False)
    console.print(f"({time.monotonic() - scene.began:.0f} s in all)\n", style="dim")
    console.print(Text("Next, with your own models and prompts:", style="bold"))
    for command in NEXT:
        console.print(f"  {command}", soft_wrap=True, markup=False)
    return content


def say_part(scene: Scene, title: str) -> None:
    scene.console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)


# --------------------------------------------------------------------------- measuring


def make_plan(scene: Scene, arms: tuple[Arm, ...]) -> BenchPlan:
    """Plain decoding and these arms on all prompts; what does not fit the time is cut later."""
    return BenchPlan(
        target=scene.target,
        arms=(Arm(name=BASELINE, drafter=NoDrafter()), *arms),
        items=scene.items,
        samplers=scene.samplers,
        max_new_tokens=scene.options.max_new_tokens,
        seed=scene.options.seed,
    )


def measure(scene: Scene, plan: BenchPlan, seconds: float, out: Path, record: Run) -> BenchReport:
    """Run the rounds that fit; their records go to `out/records.jsonl`."""
    bench = Bench(plan)
    settle_amount(bench, seconds, scene.console)
    made = bench_verb.measure(bench, out)
    return bench_verb.make_report(bench, made, scene.source, record)
