"""The script of `draftsmith quickstart`: show, compare, collect, distil, and measure the gain.

A collection and a training run have to state their size before they start, and here both have to
fit a time. So each begins with a short trial whose result is thrown away:

    trial: one batch, a few tokens   seconds per text -> number of prompts   `draftsmith collect`
    trial: a few steps on a copy     seconds per step -> number of steps     `draftsmith distill`

A measurement is cut to its time after its warm-up, when the seconds per prompt are known.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from draftsmith.bench.arms import open_drafters, time_decode
from draftsmith.bench.costs import ForwardProbe
from draftsmith.bench.records import (
    BASELINE,
    DrafterMetrics,
    Interval,
    bootstrap_interval,
    bootstrap_ratio,
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
from draftsmith.commands import bench, collect, distill, generate
from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import show
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.core import generation
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, encode
from draftsmith.core.sampling import Sampler
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import held_out_prompts, training_prompts
from draftsmith.distill import tokenizer_training
from draftsmith.distill.acceptance import Betas, expected_acceptance
from draftsmith.distill.checkpoint import work_folder
from draftsmith.distill.config import KeptConfig, ScaleConfig, ScheduleConfig
from draftsmith.distill.distilling import DistillResult, make_lesson, make_trainer
from draftsmith.distill.distributed import start_accelerator
from draftsmith.distill.students import open_student
from draftsmith.distill.trajectories.store import TrajectoryStore
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import (
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
from draftsmith.targets.hf import open_model

MODELS = Path("models/mini-code")
_ROOT = Path(__file__).resolve().parents[3]
"""The folder of a checkout; for a wheel, some folder that holds no such models."""
DISTILLED = "distilled"
"""Folder in OUT."""

# Seconds for each part. Loading, warming up, cost tables and the report come on top; the whole
# should stay under four minutes on two cores.
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

HELD_OUT_PROMPTS = 12
"""As many of these as fit are decoded."""
FEWEST_MEASURED_PROMPTS = 3
FEWEST_MEASURED_TOKENS = 24
FEWEST_REPEATED = 4
"""Fewer prompts than this are not worth repeating."""
MOST_REPEATS = 3

COLLECT_BATCH = 32
"""Texts that are continued together, and prompts of a shard."""
COLLECTED_TOKENS = 128
"""The longest text of the training data."""
COLLECT_TOP_K = 50
FEWEST_COLLECTED_PROMPTS = 8
TRIAL_TOKENS = 12

TRIAL_STEPS = 5
FEWEST_STEPS = 4
BLOCK_MULTIPLE = 128
BATCH_BLOCKS = 8
"""Blocks of an optimiser step, each long enough for the longest text."""
LEARNING_RATE = 1e-3
"""Ten times the default of `distill`: a model of one layer and a minute bear it."""
EVALUATIONS = 4
"""Evaluations on held-out prompts, the last step's included; the best weights are kept."""

BEFORE, AFTER = "shipped draft", "distilled draft"
"""Names of the two arms of the last measurement."""
DRAFT_LENGTH: Literal["adaptive"] = "adaptive"
"""As for --draft-length: a fixed length would suit one of the two better than the other."""
LEAST_GAIN = 0.001
"""The smallest gain of alpha that counts; the table rounds a smaller one to nothing."""

NEXT = (
    "draftsmith collect --target Qwen/Qwen3-4B --prompts prompts.jsonl --samples 2 "
    "--temperatures 0,1 --out runs/my-store",
    "draftsmith distill --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B --store runs/my-store "
    "--out drafts/mine",
    "draftsmith bench --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B,drafts/mine,prompt_lookup "
    "--suite held-out.jsonl --temperature 0,0.8 --out runs/my-bench",
)


def run(options: QuickstartOptions) -> dict[str, Any]:
    """Run all parts in their order; everything is written to `options.out`."""
    warn_if_busy()
    demo = Quickstart(options)
    clear(options.out)  # all that can be missing is there
    demo.choose_threads()
    demo.show()
    comparison = demo.compare()
    collected = demo.collect()
    distilled = demo.distil(collected)
    outcome = demo.measure_gain(collected, distilled)
    demo.print_outcome(outcome)
    return demo.finish(comparison, outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """The size of a collection and its time."""

    tokens: int
    trajectories: int
    prompts: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Distilled:
    """The result of a distillation and its time."""

    result: DistillResult
    seconds: float


class Quickstart:
    """The models and prompts of one quickstart, and its parts."""

    def __init__(self, options: QuickstartOptions) -> None:
        """
        Raises:
            InputError: an --out that is used for something else, no prompts on this machine, or a
                draft model that cannot read them or has another tokenizer than the target.
            BackendError: models that are missing or damaged.
        """
        self.began = time.monotonic()
        self.record = start_run("quickstart", options, seed=options.seed)
        self.options, self.console = options, Console(highlight=False)
        models = find_models(options.models)
        check_out(options.out)
        self.prompts = held_out_prompts(options.limit or HELD_OUT_PROMPTS)
        self.source, self.shipped = str(models / "target"), str(models / "draft")
        self.target = open_model(ModelConfig(target=self.source))
        self.items = tuple(Item(prompt=p.id, tokens=encode(p, self.target)) for p in self.prompts)
        self.draft = self.open_draft(self.shipped)
        check_draft(self.draft, self.target, self.items)
        self.rivals = open_drafters(("prompt_lookup", "lookahead"), DraftingConfig(), self.target)
        self.temperatures = tuple(dict.fromkeys(options.temperatures()))
        self.folder = options.out / DISTILLED

    def open_draft(self, folder: str) -> Arm:
        """A draft model whose draft length follows what is accepted."""
        drafting = DraftingConfig(draft_length=DRAFT_LENGTH)
        (arm,) = open_drafters((f"independent:{folder}",), drafting, self.target)
        return arm

    def choose_threads(self) -> None:
        """Use one thread where several are slower: beside other programs they wait for each
        other."""
        many = torch.get_num_threads()
        if many == 1 or self.target.device.type != "cpu":
            return
        probe = ForwardProbe(self.target, encode(self.prompts[0], self.target), 1)
        seconds = {}
        for threads in (many, 1):
            torch.set_num_threads(threads)
            seconds[threads] = statistics.median([probe.seconds(1) for _ in range(9)])
        if seconds[1] > 0.8 * seconds[many]:
            torch.set_num_threads(many)
            return
        self.console.print(f"One thread is faster than {many} here: using one.", style="dim")

    # ----------------------------------------------------------------------- the parts

    def show(self) -> None:
        """Decode one prompt in front of the reader."""
        prompt = self.prompts[0].text or ""
        end = "".join(prompt.splitlines(keepends=True)[-6:])
        self.console.print(
            Text.assemble(
                ("Python's own code, continued. ", "bold"),
                ("Coloured", generate.DRAFTED),
                f" tokens were drafted by a model of one layer and accepted by {self.target.name};"
                " the text is the target's own.\n",
            )
        )
        self.console.print(Text(end, style="dim"), end="")
        generate.run(
            generate.GenerateOptions(
                model=ModelConfig(target=self.source),
                drafter=f"independent:{self.shipped}",
                prompt=(prompt,),
                max_new_tokens=self.options.max_new_tokens,
                stream=True,
                drafting=DraftingConfig(draft_length=DRAFT_LENGTH),
            )
        )

    def compare(self) -> BenchReport:
        """Measure all ways to decode, interleaved."""
        self.say_part("Compared: drafters without a model, and the draft model that is shipped")
        plan = self.plan(*self.rivals, self.draft)
        report = self.measure(plan, COMPARE_SECONDS, self.options.out)
        self.console.print(terminal_table(report))
        self.say(*speed_sentences(report), *losslessness_sentences(report))
        return report

    def collect(self) -> Collected:
        """Let the target continue prompts from files that it was trained on, once at each
        temperature: those files hold none of the prompts that are measured on."""
        self.say_part(
            "Collected: texts of the target, with the probabilities it gave every next token"
        )
        began = time.monotonic()
        longest = min(COLLECTED_TOKENS, self.options.max_new_tokens)
        prompts = training_prompts()
        first = tuple(islice(prompts, COLLECT_BATCH))
        each = len(self.temperatures) * seconds_per_text(self.target, first, longest)
        left = COLLECT_SECONDS - (time.monotonic() - began)
        count = max(FEWEST_COLLECTED_PROMPTS, int(left / each))
        chosen = tuple(islice(chain(first, prompts), count))
        path = self.folder / "prompts.jsonl"
        append_jsonl(path, *({"id": prompt.id, "text": prompt.text} for prompt in chosen))
        options = collect.CollectOptions(
            model=ModelConfig(target=self.source),
            prompts=path,
            out=self.folder / "store",
            samples=1,
            temperatures=",".join(f"{temperature:g}" for temperature in self.temperatures),
            kept=KeptConfig(top_k=min(COLLECT_TOP_K, self.target.vocab_size)),
            max_new_tokens=longest,
            batch_size=COLLECT_BATCH,
            scale=ScaleConfig(shard_size=COLLECT_BATCH),
            seed=self.options.seed,
        )
        options.validate()
        self.announce(
            f"The target continues {len(chosen)} prompts by up to {longest} tokens, at temperature "
            f"{_and(self.temperatures)}: about {each * len(chosen):.0f} s.",
            "collect",
            options,
        )
        made = collect.run(options)
        return Collected(
            tokens=made["tokens"],
            trajectories=made["trajectories"],
            prompts=len(chosen),
            seconds=time.monotonic() - began,
        )

    def distil(self, collected: Collected) -> Distilled:
        """Train a copy of the shipped draft model on the store."""
        self.say_part("Distilled: the draft model learns to predict the target's next tokens")
        began = time.monotonic()
        store = self.folder / "store"
        block = block_length(store)
        options = distill.DistillOptions(
            target=self.source,
            drafter=self.shipped,
            store=(store,),
            out=self.folder / "draft",
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
            seed=self.options.seed,
        )
        each, evaluation = seconds_per_step(options)
        evaluations = (EVALUATIONS + 1) * evaluation
        left = DISTIL_SECONDS - (time.monotonic() - began) - evaluations
        steps = max(FEWEST_STEPS, int(left / each))
        options = replace(
            options,
            training=replace(
                options.training, duration=f"{steps}steps", warmup=max(1, steps // 10)
            ),
            eval_every=max(1, math.ceil(steps / EVALUATIONS)),
        )
        options.validate()
        self.announce(
            f"The draft model learns from {collected.tokens:,} tokens and their probabilities "
            f"in {steps} steps: about {steps * each + evaluations:.0f} s.",
            "distill",
            options,
        )
        result = distill.run(options)
        return Distilled(result=result, seconds=time.monotonic() - began)

    def measure_gain(self, collected: Collected, distilled: Distilled) -> Outcome:
        """Measure the draft model before and after, interleaved with plain decoding."""
        self.say_part("Before and after")
        plan = self.plan(
            replace(self.draft, name=BEFORE),
            replace(self.open_draft(distilled.result.out), name=AFTER),
        )
        acceptances = {one.temperature: self.acceptance(plan, one) for one in plan.samplers}
        left = WHOLE_SECONDS - (time.monotonic() - self.began)
        seconds = max(SHORTEST_GAIN_SECONDS, min(GAIN_SECONDS, left))
        plan = replace(plan, with_transformers=False, cost_rounds=0)
        report = self.measure(plan, seconds, self.folder)
        # sentences on temperatures above 0 are the same for every measurement and stand below the
        # comparison; what remains was found by comparing these texts at temperature 0
        above_0 = tuple(entry for entry in report.records if entry.temperature > 0)
        known = losslessness_sentences(replace(report, records=above_0))
        return Outcome(
            before=portable_text(self.shipped),
            after=portable_text(distilled.result.out),
            tokens_collected=collected.tokens,
            trajectories=collected.trajectories,
            training_prompts=collected.prompts,
            collect_seconds=collected.seconds,
            steps=distilled.result.steps,
            tokens_fed=distilled.result.tokens,
            distil_seconds=distilled.seconds,
            prompts=report.num_prompts,
            texts_of_alpha=min(one.texts for one in acceptances.values()),
            changes=tuple(
                Change.between(report, acceptances[temperature], temperature)
                for temperature in report.temperatures
            ),
            equality=tuple(one for one in losslessness_sentences(report) if one not in known),
        )

    def acceptance(self, plan: BenchPlan, sampler: Sampler) -> Acceptance:
        """Compute the acceptance of the plan's two draft models on plain decoding of all prompts,
        as far as both can read it; these are many more tokens than a slow machine measures."""
        found = [arm.drafter.drawn_from(sampler) for arm in plan.arms[1:]]
        models = [one for one in found if one is not None]
        room = min(draft.max_length or 1 << 40 for draft, _ in models)
        items = [item for item in plan.items if len(item.tokens) <= room]
        made = generation.generate(
            self.target,
            NoDrafter(),
            [item.tokens for item in items],
            plan.decode_options(sampler, plan.seed),
            batch_size=COLLECT_BATCH,
        )
        texts = [
            Trajectory(
                prompt_id=item.prompt,
                forcing="sample",
                prompt=item.tokens,
                tokens=one.token_ids[: room - len(item.tokens) + 1],
                score=math.nan,  # not used
            )
            for item, one in zip(items, made, strict=True)
        ]
        before, after = (
            expected_acceptance(self.target, draft, texts, sampler, vocabularies=ids)
            for draft, ids in models
        )
        return Acceptance.between(before, after)

    def print_outcome(self, outcome: Outcome) -> None:
        """Print what the distillation brought."""
        show("", outcome.section.columns, outcome.section.rows)
        self.console.print(Text(outcome.sentence, style="bold"), soft_wrap=True)
        self.say(outcome.method, *outcome.equality)

    def finish(self, comparison: BenchReport, outcome: Outcome) -> dict[str, Any]:
        """Write page, figures and, last, run.json; say what comes next."""
        out, distillation = self.options.out, outcome.payload()
        report = replace(comparison, sections=(outcome.section,))
        write_report(report, out)
        content: dict[str, Any] = jsonable({**summary(report), "distillation": distillation})
        write_json_atomic(out / "summary.json", content)
        results = {"records": len(report.records), "distillation": distillation}
        self.record.write(out, results=results)
        self.say(f"report: {out / 'report.html'}")
        self.console.print(f"({time.monotonic() - self.began:.0f} s in all)\n", style="dim")
        self.console.print(Text("Next, with your own models and prompts:", style="bold"))
        self.say(*(f"  {command}" for command in NEXT))
        return content

    # ----------------------------------------------------------------------- what parts share

    def plan(self, *arms: Arm) -> BenchPlan:
        """Plain decoding and these arms on all prompts; what does not fit the time is cut later."""
        return BenchPlan(
            target=self.target,
            arms=(Arm(name=BASELINE, drafter=NoDrafter()), *arms),
            items=self.items,
            samplers=tuple(Sampler(temperature=t) for t in self.temperatures),
            max_new_tokens=self.options.max_new_tokens,
            seed=self.options.seed,
        )

    def measure(self, plan: BenchPlan, seconds: float, out: Path) -> BenchReport:
        """Run the rounds that fit; their records go to `out/records.jsonl`."""

        def cut(each: float) -> BenchPlan:
            fitting = fit(plan, seconds, each)
            prompts, tokens = len(fitting.items), fitting.max_new_tokens
            often = {1: "once", 2: "twice"}.get(fitting.repeats, f"{fitting.repeats} times")
            share = fitting.repeats * tokens / plan.max_new_tokens
            self.say(
                f"Measuring {len(plan.arm_names(plan.samplers[0]))} ways to continue {prompts} "
                f"prompts by {tokens} tokens at temperature {_and(self.temperatures)}, {often}, "
                f"interleaved: about {each * prompts * share:.0f} s."
            )
            return fitting

        run = Bench(plan, on_prepared=cut)
        made = bench.measure(run, out)
        return bench.make_report(run, made, self.source, self.record)

    def say_part(self, title: str) -> None:
        self.console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)

    def say(self, *sentences: str) -> None:
        for sentence in sentences:
            self.console.print(sentence, soft_wrap=True, markup=False)

    def announce(self, sentence: str, verb: str, options: VerbOptions) -> None:
        """Say what comes now, and the command that does the same."""
        self.say(sentence)
        self.console.print(Text(f"  {command_line(verb, options)}", style="dim"), soft_wrap=True)


# --------------------------------------------------------------------------- folders


def find_models(given: Path | None) -> Path:
    """The folder with `target` and `draft`.

    Raises:
        BackendError: it is not where it should be.
    """
    places = [given] if given is not None else [_ROOT / MODELS, MODELS]
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


def check_draft(draft: Arm, target: Target, items: Sequence[Item]) -> None:
    """InputError when the acceptance of this draft model cannot be computed on any prompt."""
    found = draft.drafter.drawn_from(Sampler())
    if found is None:
        raise InputError(
            f"The draft model and {target.name} have different tokenizers, so that their "
            "probabilities cannot be compared: give --models of one tokenizer."
        )
    room, shortest = found[0].max_length, min(len(item.tokens) for item in items)
    if room is not None and shortest > room:
        raise InputError(
            f"The draft model has a context of {room} tokens, and the shortest prompt has "
            f"{shortest}: give --models with a longer context."
        )


def clear(out: Path) -> None:
    """Make room for a new quickstart. records.jsonl goes last: it says that the rest is ours."""
    for name in ("run.json", "report.html", "summary.json"):
        (out / name).unlink(missing_ok=True)
    for name in ("figures", DISTILLED):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "records.jsonl").unlink(missing_ok=True)


# --------------------------------------------------------------------------- amounts


def fit(plan: BenchPlan, seconds: float, each: float) -> BenchPlan:
    """The part of a plan that takes about so many seconds: three repeats of as many prompts as fit,
    so that a median can drop a stall of the machine; else one repeat of as many as fit; on the
    slowest machines shorter texts, too.

    Args:
        each: seconds of one prompt with all arms at all temperatures.
    """
    prompts, rounds = len(plan.items), int(seconds / max(each, 1e-9))
    if rounds >= MOST_REPEATS * min(prompts, FEWEST_REPEATED):
        return replace(plan, items=plan.items[: rounds // MOST_REPEATS], repeats=MOST_REPEATS)
    fewest, tokens = min(prompts, FEWEST_MEASURED_PROMPTS), plan.max_new_tokens
    if rounds < fewest:
        fitting = int(seconds / (each * fewest) * tokens)
        tokens = min(tokens, max(FEWEST_MEASURED_TOKENS, fitting))
    items = plan.items[: max(fewest, rounds)]
    return replace(plan, items=items, repeats=1, max_new_tokens=tokens)


def seconds_per_text(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> float:
    """Estimate the seconds of continuing a batch like these, from a few steps.

    Raises:
        InputError: the target has room for none of them.
    """
    room = target.max_length or 1 << 40
    texts = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    texts = [text for text in texts if 0 < len(text) < room]
    if not texts:
        raise InputError(f"No prompt fits into the {room} positions of {target.name}.")
    tokens = min(TRIAL_TOKENS, max_new_tokens)
    options = DecodeOptions(
        sampler=Sampler(temperature=1.0), max_new_tokens=tokens, ignore_end=True
    )
    plain = Arm(name=BASELINE, drafter=NoDrafter())
    made = time_decode(target, plain, texts, options, range(len(texts)))
    step = made.decode_seconds / max(1, len(made.widths))
    return max((made.prefill_seconds + (max_new_tokens - 1) * step) / len(texts), 1e-9)


def block_length(store: Path) -> int:
    """Room for the longest text of a store and the separator behind it."""
    texts = TrajectoryStore.open(store).trajectories()
    longest = max(len(text.prompt) + len(text.tokens) + 1 for text in texts)
    return BLOCK_MULTIPLE * math.ceil(longest / BLOCK_MULTIPLE)


def seconds_per_step(options: distill.DistillOptions) -> tuple[float, float]:
    """Measure the seconds of a step and of an evaluation on a copy of the draft model."""
    tokenizer = tokenizer_training.load_tokenizer(options.target)
    student = open_student(options, tokenizer)
    accelerator = start_accelerator(options)
    with work_folder(options.out):
        lesson = make_lesson(options, tokenizer, student)
        trainer = make_trainer(options, student, lesson, accelerator)
        marks = [time.monotonic()]
        for _ in range(TRIAL_STEPS):
            trainer.one_step()
            marks.append(time.monotonic())
        trainer.evaluate()
        evaluation = time.monotonic() - marks[-1]
    # the first step pays for what all others find ready
    steps = [after - before for before, after in pairwise(marks[1:])]
    return max(statistics.median(steps), 1e-9), evaluation


# --------------------------------------------------------------------------- before and after


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Expected acceptance of a drafted token before and after, from the probabilities of both
    models at every position of the same texts of plain decoding: no draw is in it."""

    before: float
    after: float
    gain_ci95: Interval | None
    """Bootstrap interval of after - before, over texts; None for one text."""
    texts: int

    @classmethod
    def between(cls, before: Sequence[Betas], after: Sequence[Betas]) -> Acceptance:
        """Average over all tokens of the texts. Arguments: per text, the acceptance of each
        token."""
        lengths = [len(text) for text in before]
        old, new = ([float(text.sum()) for text in side] for side in (before, after))
        gains = [b - a for a, b in zip(old, new, strict=True)]
        return cls(
            before=sum(old) / sum(lengths),
            after=sum(new) / sum(lengths),
            gain_ci95=bootstrap_ratio(gains, lengths),
            texts=len(lengths),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The draft model before and after at one temperature."""

    temperature: float
    before: DrafterMetrics
    after: DrafterMetrics
    acceptance: Acceptance
    ratio: float | None
    """Seconds per token before / after."""
    ratio_ci95: Interval | None
    """Bootstrap interval over prompts."""

    @classmethod
    def between(cls, report: BenchReport, acceptance: Acceptance, temperature: float) -> Change:
        """Read the change from a measurement of BEFORE and AFTER."""
        found = {one.name: one for one in report.metrics if one.temperature == temperature}
        paces = paired_paces(report.of(BEFORE, temperature), report.of(AFTER, temperature))
        return cls(
            temperature=temperature,
            before=found[BEFORE],
            after=found[AFTER],
            acceptance=acceptance,
            ratio=weighted_speedup(paces),
            ratio_ci95=bootstrap_interval(paces),
        )

    @property
    def accepted(self) -> str:
        """How often, in words; a change is claimed only where 0 lies outside the interval."""
        gain = self.acceptance.after - self.acceptance.before
        interval = self.acceptance.gain_ci95
        if interval is None or interval.low <= 0 <= interval.high or abs(gain) < LEAST_GAIN:
            return "not measurably more often"
        return "more often" if gain > 0 else "less often"

    @property
    def fast(self) -> str:
        """How fast, in words; a gain is claimed only where 1 lies outside the interval."""
        interval = self.ratio_ci95
        if interval is not None and interval.low > 1:
            return "faster"
        slower = interval is not None and interval.high < 1
        return "slower" if slower else "not measurably faster"

    def rows(self) -> tuple[tuple[str, ...], ...]:
        """(figure, before, after, gain)."""
        before, after = self.before, self.after
        old, new, interval = (
            self.acceptance.before,
            self.acceptance.after,
            self.acceptance.gain_ci95,
        )
        points, more = f"{100 * (new - old):+.1f} points", ""
        if interval is not None:
            points += f" ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
        if before.tokens_per_step and after.tokens_per_step:
            more = f"{100 * (after.tokens_per_step / before.tokens_per_step - 1):+.0f} %"
        faster = "" if self.ratio is None else f"{100 * (self.ratio - 1):+.0f} %"
        if self.ratio_ci95 is not None:
            faster += f" ({interval_text(self.ratio_ci95)}x)"
        steps = (number(one.tokens_per_step) for one in (before, after))
        return (
            (
                "acceptance (alpha)",
                *(f"{100 * alpha:.1f} %" for alpha in (old, new)),
                points,
            ),
            ("tokens per step (tau)", *steps, more),
            ("measured speed-up", times(before.speedup), times(after.speedup), faster),
        )

    def payload(self) -> dict[str, Any]:
        before, after = (
            {
                "alpha": alpha,
                "tokens_per_step": side.tokens_per_step,
                "speedup": side.speedup,
                "speedup_ci95": _pair(side.speedup_ci95),
            }
            for side, alpha in (
                (self.before, self.acceptance.before),
                (self.after, self.acceptance.after),
            )
        )
        same = [one.identical_to_autoregressive for one in (self.before, self.after)]
        return {
            "temperature": self.temperature,
            "before": before,
            "after": after,
            "speed_ratio": self.ratio,
            "speed_ratio_ci95": _pair(self.ratio_ci95),
            "identical_to_autoregressive": None if None in same else all(same),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a distillation cost and brought; the first fields are keys of summary.json."""

    before: str
    """Folder of the draft model that it began with."""
    after: str
    tokens_collected: int
    """Tokens of the continuations."""
    trajectories: int
    training_prompts: int
    collect_seconds: float
    steps: int
    tokens_fed: int
    """Fed in all steps, prompts and repetitions included."""
    distil_seconds: float
    prompts: int
    """Held-out prompts that were decoded."""
    texts_of_alpha: int
    """Texts of plain decoding that alpha was computed on, at each temperature at least."""
    changes: tuple[Change, ...]
    equality: tuple[str, ...]
    """Sentences on whether the target's text stayed the same."""

    @property
    def sentence(self) -> str:
        """What happened, in one sentence; it never says more than was measured."""
        accepted = _by_temperature((c.temperature, c.accepted) for c in self.changes)
        fast = _by_temperature((c.temperature, c.fast) for c in self.changes)
        better = any(c.accepted == "more often" or c.fast == "faster" for c in self.changes)
        verb = "is" if better else "is no better: it is"
        return (
            f"After {self.distil_seconds:.0f} s of distillation on {self.tokens_collected:,} "
            f"tokens of the target the draft model {verb} accepted {accepted} than before, and "
            f"decoding with it is {fast}."
        )

    @property
    def method(self) -> str:
        """How it was measured."""
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts} prompts"
        texts = "1 text" if self.texts_of_alpha == 1 else f"{self.texts_of_alpha} texts"
        return (
            f"Both draft models draft with --draft-length {DRAFT_LENGTH}: two tokens more after a "
            "draft that was accepted whole, one less after any other. Alpha is computed on "
            f"{texts} of plain decoding at each temperature; the rest is measured on {prompts}, "
            "decoded with both and plainly, interleaved. These prompts are from files that nothing "
            "was collected from, and that models/mini-code was not trained on."
        )

    @property
    def section(self) -> Section:
        """The table and its sentences."""
        return Section(
            title="Before and after distillation",
            sentences=(self.sentence, self.method, *self.equality),
            columns=("temperature", "figure", "before", "after", "gain"),
            rows=tuple((f"{c.temperature:g}", *row) for c in self.changes for row in c.rows()),
        )

    def payload(self) -> dict[str, Any]:
        """For summary.json and run.json: plain values."""
        plain = asdict(replace(self, changes=(), equality=()))
        del plain["changes"], plain["equality"]
        temperatures = [change.payload() for change in self.changes]
        first = {"sentence": self.sentence, "draft_length": DRAFT_LENGTH}
        return {**first, **plain, "temperatures": temperatures}


def _by_temperature(words: Iterable[tuple[float, str]]) -> str:
    """`faster at temperature 0 and no faster at temperature 0.8`."""
    where: dict[str, list[float]] = {}
    for temperature, word in words:
        where.setdefault(word, []).append(temperature)
    return " and ".join(f"{word} at temperature {_and(some)}" for word, some in where.items())


def _and(temperatures: Iterable[float]) -> str:
    return " and ".join(f"{temperature:g}" for temperature in temperatures)


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
