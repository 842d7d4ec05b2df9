"""The script of `draftsmith quickstart`: show, compare, collect, distil, and measure the gain.

`Demo` has what all models share; `SmallModels` is the script on those of the repository, or of the
caller. A really trained model has its own: `quickstart_real.py`.

A measurement takes as many prompts as fit its time after the warm-up. The other amounts follow from
how fast plain decoding was in the comparison:

    median seconds per token of a text decoded alone -> prompts to collect, steps to train
"""

from __future__ import annotations

import abc
import math
import shutil
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from draftsmith.bench import records as figures
from draftsmith.bench import summary as results
from draftsmith.bench.arms import open_drafters
from draftsmith.bench.run import Bench, BenchPlan, Item, make_items
from draftsmith.bench.summary import BenchReport
from draftsmith.commands import bench, collect, distill, generate
from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import show
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.core import generation
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.speedup import rejections_saved
from draftsmith.data.suites import held_out_prompts, training_prompts
from draftsmith.distill.acceptance import expected_acceptance
from draftsmith.distill.config import KeptConfig, ScaleConfig, ScheduleConfig
from draftsmith.distill.trajectories.types import Trajectory
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.none import NoDrafter
from draftsmith.errors import BackendError, InputError
from draftsmith.intervals import Interval, bootstrap_ratio
from draftsmith.provenance import (
    BEGUN,
    append_jsonl,
    command_line,
    jsonable,
    portable_text,
    refuse_others,
    start_run,
    write_json_atomic,
)
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_model

MODELS = Path("models/mini-code")
ROOT = Path(__file__).resolve().parents[3]
"""The folder of a checkout; for a wheel, some folder that holds no such models."""
DISTILLED = "distilled"
"""Folder in OUT."""

# Loading, warming up, cost tables and the report come on top: about three minutes in all on two
# cores.
COMPARE_SECONDS = 18.0
COLLECT_SECONDS = 20.0
DISTIL_SECONDS = 42.0
GAIN_SECONDS = 26.0

HELD_OUT_PROMPTS = 12
"""As many of these as fit are decoded."""
FEWEST_MEASURED_PROMPTS = 3
REPEATS = 3
"""A median drops a stall of the machine. One, where the fewest prompts do not fit so often."""
BATCH = 32
"""Texts that are continued together, and prompts of a shard."""
COLLECTED_COST = 0.7
"""Time of a token that is collected in such a batch / of one that is decoded alone."""
FEWEST_COLLECTED_PROMPTS = 8
FEWEST_STEPS = 4
BLOCK_LENGTH = 1024
"""A training block is as long, or as the longest text that is measured."""
WARMUP_SHARE = 10
"""One step in so many has a learning rate that still rises."""
EVALUATIONS = 4
"""Evaluations on held-out prompts, the last step's included; the best weights are kept."""

BEFORE, AFTER = "shipped draft", "distilled draft"
"""Names of the two arms of the last measurement."""
DRAFT_LENGTH: Literal["adaptive"] = "adaptive"
"""As for --draft-length: a fixed length would suit one of the two better than the other."""
LEAST_GAIN = 0.001
"""A smaller gain does not count: the table rounds it to nothing."""

NEXT = (
    "draftsmith collect --target Qwen/Qwen3-4B --prompts prompts.jsonl --samples 2 "
    "--temperatures 0,1 --out runs/my-store",
    "draftsmith distill --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B --store runs/my-store "
    "--out drafts/mine",
    "draftsmith bench --target Qwen/Qwen3-4B --drafter Qwen/Qwen3-0.6B,drafts/mine,prompt_lookup "
    "--suite held-out.jsonl --temperature 0,0.8 --out runs/my-bench",
)


class Demo(abc.ABC):
    """The models and prompts of one quickstart, and its parts."""

    target: HFTarget
    items: tuple[Item, ...]
    """What is decoded to compare."""
    max_new_tokens: int
    pace: float
    """Median seconds of a token that is decoded plainly and alone, once that is compared."""

    def __init__(self, options: QuickstartOptions, temperatures: Sequence[float]) -> None:
        """`temperatures`: to learn for and to measure at, where the options name none."""
        self.began, self.options = time.monotonic(), options
        self.record = start_run("quickstart", options, seed=options.seed)
        self.say = Console(highlight=False, markup=False, soft_wrap=True).print
        self.temperatures = options.temperatures() or tuple(temperatures)
        self.folder = options.out / DISTILLED
        refuse_others(options.out, "quickstart", (*_FOLDERS, *_FILES))

    @abc.abstractmethod
    def show(self) -> None:
        """Decode one prompt in front of the reader."""

    @abc.abstractmethod
    def compare(self) -> BenchReport:
        """Measure ways to decode, interleaved, and set `pace`."""

    @abc.abstractmethod
    def collect(self) -> dict[str, Any]:
        """Let the target write what is learnt from; return what that cost."""

    @abc.abstractmethod
    def distil(self) -> dict[str, Any]:
        """Train on it; return what that cost."""

    @abc.abstractmethod
    def measure_gain(self, cost: dict[str, Any]) -> tuple[dict[str, Any], results.Section]:
        """Measure the drafter before and after, interleaved with plain decoding.

        Returns what the distillation cost and brought: for the files, and as a part of the page.
        """

    def run(self) -> dict[str, Any]:
        """Run all parts in their order; everything is written to `options.out`."""
        clear(self.options.out)  # all that can be missing is there
        self.record.begin(self.options.out)
        self.show()
        comparison = self.compare()
        cost = {**self.collect(), **self.distil()}
        return self.finish(comparison, *self.measure_gain(cost))

    def finish(
        self, comparison: BenchReport, distillation: dict[str, Any], section: results.Section
    ) -> dict[str, Any]:
        """Print what the distillation brought; write page, figures and, last, run.json."""
        out = self.options.out
        show("", section.columns, section.rows)
        self.say(section.sentences[0], style="bold")
        self.say(*section.sentences[1:], sep="\n")
        report = replace(comparison, sections=(section,))
        results.write_report(report, out)
        content: dict[str, Any] = jsonable(
            {**results.summary(report), "distillation": distillation}
        )
        write_json_atomic(out / "summary.json", content)
        written = {"records": len(report.records), "distillation": distillation}
        self.record.write(out, results=written)
        self.say(f"report: {out / 'report.html'}")
        self.say(f"({time.monotonic() - self.began:.0f} s in all)", style="dim")
        self.title("Next, with your own models and prompts:")
        self.say(*(f"  {command}" for command in NEXT), sep="\n")
        return content

    # ----------------------------------------------------------------------- what parts share

    def plan(self, *arms: Arm) -> BenchPlan:
        """Plain decoding and these arms on all prompts; what does not fit the time is cut later."""
        return BenchPlan(
            target=self.target,
            arms=(Arm(name=figures.BASELINE, drafter=NoDrafter()), *arms),
            items=self.items,
            samplers=tuple(Sampler(temperature=t) for t in self.temperatures),
            max_new_tokens=self.max_new_tokens,
            seed=self.options.seed,
            run=self.record.id,
        )

    def tell(self, report: BenchReport) -> None:
        """Print what was measured."""
        self.say(results.terminal_table(report), soft_wrap=False)
        self.say(*results.speed_sentences(report), sep="\n")
        self.say(*results.losslessness_sentences(report), sep="\n")

    def measure(
        self, plan: BenchPlan, seconds: float, out: Path, target: str, repeats: int = REPEATS
    ) -> BenchReport:
        """Run the rounds that fit; their records go to `out/records.jsonl`. `target`: its name."""

        def cut(each: float) -> BenchPlan:
            fitting, arms = fit(plan, seconds, each, repeats), len(plan.arm_names(plan.samplers[0]))
            self.say(
                f"Measuring {arms} ways to continue prompts by {plan.max_new_tokens} tokens at "
                f"temperature {listed(one.temperature for one in plan.samplers)}, interleaved. "
                "Prompts: "
                f"{len(fitting.items)}, repeats: {fitting.repeats}."
            )
            return fitting

        run = Bench(plan, on_prepared=cut)
        made = bench.measure(run, out)
        return bench.make_report(run, made, target, self.record)

    def title(self, text: str) -> None:
        self.say(f"\n{text}", style="bold")

    def announce(self, text: str, verb: str, options: VerbOptions) -> None:
        """Say what comes now, and the command that does the same."""
        options.validate()
        self.say(text)
        self.say(f"  {command_line(verb, options)}", style="dim")

    def run_collect(self, options: CollectOptions, told: str, prompts: int) -> dict[str, Any]:
        """Announce and run it; return what it cost."""
        self.announce(told, "collect", options)
        began = time.monotonic()
        made = collect.run(options)
        return {
            "tokens_collected": made["tokens"],
            "trajectories": made["trajectories"],
            "training_prompts": prompts,
            "collect_seconds": time.monotonic() - began,
        }

    def run_distil(
        self, options: distill.DistillOptions, told: str, seconds: float, fewest: int
    ) -> dict[str, Any]:
        """Announce and run it, in as many steps as fit but no fewer than these; return what it
        cost. `told`: a sentence with a gap for the steps."""
        steps = max(fewest, int(seconds / distill.time_step(options)))
        training = replace(
            options.training, duration=f"{steps}steps", warmup=max(1, steps // WARMUP_SHARE)
        )
        options = replace(options, training=training, eval_every=math.ceil(steps / EVALUATIONS))
        self.announce(told.format(steps), "distill", options)
        began = time.monotonic()
        result = distill.run(options)
        return {
            "after": portable_text(result.out),
            "steps": result.steps,
            "tokens_fed": result.tokens,
            "distil_seconds": time.monotonic() - began,
        }


class SmallModels(Demo):
    """Continues Python's own code; a draft model of one layer learns."""

    def __init__(self, options: QuickstartOptions) -> None:
        """
        Raises:
            InputError: an --out that is used for something else, no prompts on this machine, or a
                context that no prompt fits into, or a draft model with another tokenizer.
            BackendError: models that are missing or damaged.
        """
        models = find_models(options.models)
        super().__init__(options, (0.0, 0.8))
        self.prompts = held_out_prompts(options.limit or HELD_OUT_PROMPTS)
        self.source, self.shipped = str(models / "target"), str(models / "draft")
        self.target = open_model(ModelConfig(target=self.source))
        self.draft = self.open_draft(self.shipped)
        self.rivals = open_drafters(("prompt_lookup", "lookahead"), DraftingConfig(), self.target)
        found = self.draft.drafter.drawn_from(Sampler())
        if found is None:
            raise InputError(
                f"The draft model and {self.target.name} have different tokenizers, so that their "
                "probabilities cannot be compared: give --models of one tokenizer."
            )
        self.context = min(model.max_length or 1 << 40 for model in (found[0], self.target))
        self.items = tuple(
            item
            for item in make_items(self.prompts, self.target, options.max_new_tokens)
            if len(item.tokens) < self.context
        )
        if not self.items:
            raise InputError(
                f"No prompt fits into the context of {self.context} tokens: give --models with a "
                "longer context."
            )
        longest = max(len(item.tokens) for item in self.items)
        self.max_new_tokens = min(options.max_new_tokens, self.context - longest)
        self.block = min(self.context, max(BLOCK_LENGTH, longest + self.max_new_tokens))

    def open_draft(self, folder: str) -> Arm:
        """A draft model whose draft length follows what is accepted."""
        drafting = DraftingConfig(draft_length=DRAFT_LENGTH)
        (arm,) = open_drafters((f"independent:{folder}",), drafting, self.target)
        return arm

    def show(self) -> None:
        """Decode one prompt in front of the reader."""
        prompt = self.prompts[0].text or ""
        self.title(
            "Python's own code, continued. Coloured tokens were drafted by a model of one layer "
            f"and accepted by {self.target.name}; the text is the target's own.\n"
        )
        self.say("".join(prompt.splitlines(keepends=True)[-6:]), style="dim", end="")
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
        self.title("Compared: drafters without a model, and the draft model that is shipped")
        plan = self.plan(*self.rivals, self.draft)
        report = self.measure(plan, COMPARE_SECONDS, self.options.out, self.source)
        self.pace = pace_of(report)
        self.tell(report)
        if any((one.speedup or 1) < 1 for one in report.drafters):
            self.say(
                f"A token of this toy takes {1e3 * self.pace:.1f} ms: the bookkeeping of a draft "
                "costs as much as its forwards, so most drafts lose. What carries over to models "
                "of a real size is how many tokens are accepted."
            )
        return report

    def collect(self) -> dict[str, Any]:
        """Let the target continue prompts from files that it was trained on, once at each
        temperature: those files hold none of the prompts that are measured on."""
        self.title(
            "Collected: texts of the target, with the probabilities it gave every next token"
        )
        tokens = self.max_new_tokens
        each = self.pace * COLLECTED_COST * tokens * len(self.temperatures)
        count = max(FEWEST_COLLECTED_PROMPTS, int(COLLECT_SECONDS / each))
        prompts = list(islice(training_prompts(), count))
        path = self.folder / "prompts.jsonl"
        append_jsonl(path, *({"id": prompt.id, "text": prompt.text} for prompt in prompts))
        options = CollectOptions(
            model=ModelConfig(target=self.source),
            prompts=path,
            out=self.folder / "store",
            samples=1,
            temperatures=",".join(f"{temperature:g}" for temperature in self.temperatures),
            kept=KeptConfig(top_k=min(50, self.target.vocab_size)),
            max_new_tokens=tokens,
            batch_size=BATCH,
            scale=ScaleConfig(shard_size=BATCH),
            seed=self.options.seed,
        )
        return self.run_collect(
            options,
            f"The target continues {len(prompts)} prompts by up to {tokens} tokens, at temperature "
            f"{listed(self.temperatures)}.",
            len(prompts),
        )

    def distil(self) -> dict[str, Any]:
        self.title("Distilled: the draft model learns to predict the target's next tokens")
        options = distill.DistillOptions(
            target=self.source,
            drafter=self.shipped,
            store=(self.folder / "store",),
            out=self.folder / "draft",
            training=ScheduleConfig(
                duration=f"{FEWEST_STEPS}steps",
                block_length=self.block,
                batch_tokens=8 * self.block,
                learning_rate=1e-3,  # three times that of `distill`: one layer bears it
                schedule="cosine",
                betas=(0.9, 0.999),
                weight_decay=0.0,
            ),
            save_every=1_000_000,  # the end and an interruption save one anyway
            seed=self.options.seed,
        )
        told = "The draft model learns from these texts and probabilities in {} steps."
        return self.run_distil(options, told, DISTIL_SECONDS, FEWEST_STEPS)

    def measure_gain(self, cost: dict[str, Any]) -> tuple[dict[str, Any], results.Section]:
        self.title("Before and after")
        before = replace(self.draft, name=BEFORE)
        after = replace(self.open_draft(str(self.folder / "draft")), name=AFTER)
        plan = replace(self.plan(before, after), with_transformers=False, cost_rounds=0)
        report = self.measure(plan, GAIN_SECONDS, self.folder, self.source)
        changes = [change(report, s.temperature, *self.acceptance(plan, s)) for s in plan.samplers]
        told, prompts, texts = sentence(cost, changes), report.num_prompts, len(self.items)
        method = (
            f"Both draft models draft with --draft-length {DRAFT_LENGTH}: two tokens more after a "
            "draft that was accepted whole, one less after any other. Alpha is computed on texts "
            f"of plain decoding ({texts} at each temperature); the rest is measured on prompts "
            f"({prompts}), decoded with both and plainly, interleaved. Nothing was collected from "
            "the files of these prompts, and models/mini-code was not trained on them."
        )
        greedy = replace(report, records=tuple(r for r in report.records if r.temperature == 0))
        section = results.Section(
            title="Before and after distillation",
            sentences=(told, method, *results.losslessness_sentences(greedy)),
            columns=("temperature", "figure", "before", "after", "gain"),
            rows=tuple((f"{one.temperature:g}", *row) for one in changes for row in one.rows),
        )
        distillation = {
            "sentence": told,
            "draft_length": DRAFT_LENGTH,
            "before": portable_text(self.shipped),
            **cost,
            "prompts": prompts,
            "texts_of_alpha": texts,
            "temperatures": [one.payload for one in changes],
        }
        return distillation, section

    def acceptance(
        self, plan: BenchPlan, sampler: Sampler
    ) -> tuple[list[float], list[float], list[int]]:
        """Return by text of plain decoding: how many of its tokens each of the plan's two draft
        models is expected to get accepted, and its tokens. No draw of a draft is in it, and all
        prompts are: many more tokens than a slow machine measures."""
        made = generation.generate(
            self.target,
            NoDrafter(),
            [item.tokens for item in self.items],
            plan.decode_options(sampler, plan.seed),
            batch_size=BATCH,
        )
        texts = [
            Trajectory(
                prompt_id=item.prompt,
                forcing="sample",
                prompt=item.tokens,
                tokens=one.token_ids,
                score=math.nan,  # not used
            )
            for item, one in zip(self.items, made, strict=True)
        ]
        models = [arm.drafter.drawn_from(sampler) for arm in plan.arms[1:]]
        before, after = (
            expected_acceptance(self.target, draft, texts, sampler, vocabularies=ids)
            for draft, ids in filter(None, models)
        )
        return (
            [float(beta.sum()) for beta in before],
            [float(beta.sum()) for beta in after],
            [len(text.tokens) for text in texts],
        )


def pace_of(report: BenchReport) -> float:
    """Median seconds of a token that is decoded plainly and alone."""
    plain = [one for one in report.records if one.drafter == figures.BASELINE]
    return statistics.median(one.seconds / one.tokens for one in plain)


def fit(plan: BenchPlan, seconds: float, each: float, repeats: int = REPEATS) -> BenchPlan:
    """The part of a plan that takes about so many seconds, where one prompt takes `each`."""
    rounds = int(seconds / max(each, 1e-9))
    repeats = repeats if rounds >= repeats * FEWEST_MEASURED_PROMPTS else 1
    prompts = max(FEWEST_MEASURED_PROMPTS, rounds // repeats)
    return replace(plan, items=plan.items[:prompts], repeats=repeats)


# --------------------------------------------------------------------------- folders


def find_models(given: Path | None) -> Path:
    """The folder with `target` and `draft`.

    Raises:
        BackendError: it is not where it should be.
    """
    places = [given] if given is not None else [ROOT / MODELS, MODELS]
    found = find_folder(places, "target/config.json", "draft")
    if found is not None:
        return found
    raise BackendError(
        f"There are no folders target and draft with models in {given or MODELS}: run this from a "
        "checkout of draftsmith's repository, which has models/mini-code, or give another folder "
        "by --models."
    )


def find_folder(places: Iterable[Path], *parts: str) -> Path | None:
    """The first of these folders that has all these parts, as seen from here."""
    here = Path.cwd()
    for place in places:
        if all((place / part).exists() for part in parts):
            return place.relative_to(here) if place.is_relative_to(here) else place
    return None


_FOLDERS = ("figures", DISTILLED, "smollm2")
"""The last is of earlier versions."""
_FILES = ("report.html", "summary.json", "records.jsonl")


def clear(out: Path) -> None:
    """Make room for a new quickstart; what says that the rest is ours goes last."""
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (*_FILES, "run.json", BEGUN):
        (out / name).unlink(missing_ok=True)


# --------------------------------------------------------------------------- before and after


class Change(NamedTuple):
    """The draft model before and after at one temperature."""

    temperature: float
    accepted: str
    """How often, in words."""
    fast: str
    """How decoding compares with before, in words."""
    slow: bool
    """Decoding is measurably slower than without a draft, also after."""
    rows: tuple[tuple[str, ...], ...]
    """(figure, before, after, gain)."""
    payload: dict[str, Any]
    """For summary.json and run.json."""


def change(
    report: BenchReport,
    temperature: float,
    before: Sequence[float],
    after: Sequence[float],
    tokens: Sequence[int],
) -> Change:
    """Compare BEFORE and AFTER. `before`, `after`, `tokens`: from `SmallModels.acceptance`."""
    found = {one.name: one for one in report.metrics if one.temperature == temperature}
    sides = (found[BEFORE], found[AFTER])
    alphas = [sum(accepted) / sum(tokens) for accepted in (before, after)]
    gains = [new - old for old, new in zip(before, after, strict=True)]
    gain = bootstrap_ratio(gains, tokens)
    paces = figures.paired_paces(report.of(BEFORE, temperature), report.of(AFTER, temperature))
    ratio, spread = figures.weighted_speedup(paces), figures.bootstrap_interval(paces)
    plain = sides[1].speedup_ci95
    points, faster = f"{100 * (alphas[1] - alphas[0]):+.1f} points", ""
    old_alpha, new_alpha = (min(alpha, 1.0) for alpha in alphas)
    saved = f"{100 * float(rejections_saved(new_alpha, old_alpha)):.1f} %" if old_alpha < 1 else ""
    if gain is not None:
        points += f" ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
    if ratio is not None:
        faster = f"{100 * (ratio - 1):+.0f} %" + (
            f" ({results.interval_text(spread)}x)" if spread else ""
        )
    steps = [side.decode_tokens_per_step or math.nan for side in sides]
    same = [side.identical_to_autoregressive for side in sides]
    kept = ("tokens_per_step", "decode_tokens_per_step", "loop_share", "speedup", "speedup_ci95")
    old, new = (
        {"alpha": alpha} | {name: getattr(side, name) for name in kept}
        for alpha, side in zip(alphas, sides, strict=True)
    )
    return Change(
        temperature=temperature,
        accepted=judged(gain, 0.0, "more often", "less often"),
        fast=judged(spread, 1.0, "faster", "slower"),
        slow=plain is not None and plain.high < 1,
        rows=(
            ("acceptance (alpha)", *(f"{100 * alpha:.1f} %" for alpha in alphas), points),
            ("rejections saved", "", "", saved),
            (
                "tokens per step (tau)",
                *map(results.number, steps),
                f"{100 * (steps[1] / steps[0] - 1):+.0f} %",
            ),
            ("tokens in loops", *(results.percent(side.loop_share) for side in sides), ""),
            ("measured speed-up", *(results.times(side.speedup) for side in sides), faster),
        ),
        payload={
            "temperature": temperature,
            "before": old,
            "after": new,
            "speed_ratio": ratio,
            "speed_ratio_ci95": spread,
            "identical_to_autoregressive": None if None in same else all(same),
        },
    )


def judged(interval: Interval | None, nothing: float, better: str, worse: str) -> str:
    """A change in words; one is claimed only where `nothing` lies outside the interval."""
    if interval is not None and interval.low > nothing + LEAST_GAIN:
        return better
    sure = interval is not None and interval.high < nothing - LEAST_GAIN
    return worse if sure else f"not measurably {better}"


def sentence(cost: dict[str, Any], changes: Sequence[Change]) -> str:
    """What happened, in one sentence; it never says more than was measured."""
    accepted = by_temperature((one.temperature, one.accepted) for one in changes)
    fast = by_temperature((one.temperature, one.fast) for one in changes)
    slow = [one.temperature for one in changes if one.slow]
    still = f", but slower than plain decoding at temperature {listed(slow)}" if slow else ""
    better = any(one.accepted == "more often" or one.fast == "faster" for one in changes)
    verb = "is" if better else "is no better: it is"
    return (
        f"After {cost['distil_seconds']:.0f} s of distillation on {cost['tokens_collected']:,} "
        f"tokens of the target the draft model {verb} accepted {accepted} than before, and "
        f"decoding with it is {fast} than before{still}."
    )


def by_temperature(words: Iterable[tuple[float, str]]) -> str:
    """Such as `faster at temperature 0 and no faster at temperature 0.8`."""
    where: dict[str, list[float]] = {}
    for temperature, word in words:
        where.setdefault(word, []).append(temperature)
    return " and ".join(f"{word} at temperature {listed(some)}" for word, some in where.items())


def listed(temperatures: Iterable[float]) -> str:
    """`0 and 0.8`."""
    return " and ".join(f"{temperature:g}" for temperature in temperatures)
