"""What `controller.py` decodes, and what it cost: prompts, drafters, costs of steps, prices."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draftsmith.bench.arms import time_decode
from draftsmith.bench.costs import CostTable, Workload, measure_all
from draftsmith.bench.loops import in_loops
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import LengthPolicy, RowStats, StepCount, TreeShape
from draftsmith.data.suites import held_out_prompts
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.config import drafter_manifest
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import LONGEST_AUTO, AdaptiveLength, Learning, StepCosts
from draftsmith.targets.hf import HFTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import MINI_CODE, random_llama

DOCS = Path(__file__).resolve().parents[2] / "docs"
SEEN = 54
"""Held-out prompts that are not judged by: constants.py has chosen the controller's constants by
the first 24, and its rules were tried on others. Those behind overlap with none."""
SEEN_PASSAGES = 12
"""The same of the passages of prose."""
TEMPERATURES = (0.0, 0.8)
"""Temperatures at which costs are measured: without draws and with them."""
Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """Prompts, and how their continuations are drawn."""

    name: str
    prompts: tuple[Tokens, ...]
    temperature: float
    first_id: int
    """Request id of the first one. No two texts share one: their draws are of their own."""

    @property
    def label(self) -> str:
        return f"{self.name}, T = {self.temperature:g}"

    @property
    def cost_temperature(self) -> float:
        """The temperature at which its steps were measured."""
        return min(TEMPERATURES[-1], self.temperature)

    @property
    def ids(self) -> range:
        return range(self.first_id, self.first_id + len(self.prompts))

    def options(self, tokens: int) -> DecodeOptions:
        sampler = Sampler(temperature=self.temperature)
        return DecodeOptions(sampler=sampler, max_new_tokens=tokens, ignore_end=True)

    def alone(self) -> list[PromptSet]:
        """A set for each prompt."""
        return [
            replace(self, prompts=(prompt,), first_id=self.first_id + number)
            for number, prompt in enumerate(self.prompts)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """At one temperature."""

    table: CostTable
    by_length: dict[str, StepCosts]
    """Per drafter."""

    @property
    def plain(self) -> float:
        """Seconds of a whole step without a draft; the loop asks an empty drafter, too."""
        besides = (one.seconds(0) - one.target_D[0] for one in self.by_length.values())
        return self.table.target_seconds(1) + min(besides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """What one way to draft cost on each prompt, in forwards of plain decoding."""

    seconds_P: np.ndarray
    tokens_P: np.ndarray
    drafted: float
    """Mean length of the drafts, steps without one included."""


def prompt_sets(target: HFTarget, count: int) -> tuple[PromptSet, ...]:
    tokenizer = target.tokenizer
    files = held_out_prompts(SEEN + 2 * count)[SEEN:]
    code = [prompt.token_ids(tokenizer) for prompt in files]
    pages = "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    passages = [text for text in pages.split("\n\n") if len(text) > 250 and text[0].isalpha()]
    prose = [
        tuple(tokenizer.encode(text[:220], add_special_tokens=False))
        for text in passages[SEEN_PASSAGES:]
    ]
    # the end of a text, and its beginning once more: it is likely to go on as before
    again = [(*ids[-160:], *ids[-160:-100]) for ids in code if len(ids) > 120]
    found: list[PromptSet] = []
    for name, prompts, temperatures in (
        ("code", code, (0.0, 0.8, 1.0)),
        ("prose", prose, (0.0, 0.8)),
        ("repeated code", again, (0.0, 0.8)),
    ):
        for temperature in temperatures:
            found.append(
                PromptSet(
                    name=name,
                    prompts=tuple(prompts[:count]),
                    temperature=temperature,
                    first_id=len(found) * count,
                )
            )
    return tuple(found)


def arms(target: HFTarget, trained: Path | None) -> tuple[Arm, ...]:
    """Each by its name; the trained drafter's is its kind, and it comes last.

    Raises:
        InputError: the folder holds no drafter, or one of a kind that is there already.
    """
    size = {"layers": 1, "hidden": 64, "intermediate": 128, "heads": 2, "context": 2048}
    noise = random_llama(**size, vocab=target.vocab_size, dtype=target.dtype)
    noise.tokenizer = target.tokenizer
    drafters: dict[str, Drafter] = {
        "prompt_lookup": PromptLookup(),
        "lookahead": Lookahead(),
        "independent": Independent(Independent.Config(source=str(MINI_CODE / "draft"))),
        "useless": Independent(Independent.Config(), model=noise),
    }
    if trained is not None:
        kind = drafter_manifest(trained)["kind"]
        if kind in drafters:
            raise InputError(
                f"{trained} holds a drafter of the kind {kind}, one of which is judged already: "
                "give one that reads hidden states"
            )
        drafters[kind] = load_drafter(str(trained))
    for drafter in drafters.values():
        drafter.bind(target)
    return tuple(
        Arm(
            name=name,
            drafter=one,
            shape=TreeShape.chain(min(LONGEST_AUTO, one.longest or LONGEST_AUTO)),
        )
        for name, one in drafters.items()
    )


def measure(
    target: HFTarget, drafters: Sequence[Arm], sampler: Sampler, workload: Workload, rounds: int
) -> Measured:
    meter, costs = measure_all(target, drafters, sampler, workload, rounds)
    return Measured(table=meter.table(), by_length=costs)


@dataclass(frozen=True, slots=True)
class Noted:
    """A policy, and all steps of the rows that were decoded by it."""

    policy: LengthPolicy
    rows: list[list[StepCount]]

    @property
    def max_length(self) -> int:
        return self.policy.max_length

    def together(self, stats: Sequence[RowStats]) -> int | None:
        return self.policy.together(stats)

    def keeps(self, steps: int, last: StepCount) -> bool:
        return self.policy.keeps(steps, last)

    def rest(self, pause: int) -> int:
        return self.policy.rest(pause)

    def length(self, stats: RowStats) -> int:
        return self.policy.length(stats)

    def learn(self, rows: Sequence[Sequence[StepCount]]) -> None:
        self.rows.extend(map(list, rows))
        self.policy.learn(rows)


def loop_share(target: HFTarget, prompts: PromptSet, tokens: int) -> float:
    """The share of the target's own tokens that lies in repetition loops, which flatter drafts."""
    drafter = NoDrafter()
    drafter.bind(target)
    plain = Arm(name="none", drafter=drafter)
    run = time_decode(target, plain, prompts.prompts, prompts.options(tokens), prompts.ids)
    return float(np.concatenate([in_loops(text) for text in run.tokens]).mean())


def price(
    target: HFTarget,
    arm: Arm,
    prompts: PromptSet,
    by_temperature: Mapping[str, Measured],
    tokens: int,
) -> Priced:
    """Decode all prompts."""
    measured = by_temperature[f"{prompts.cost_temperature:g}"]
    options = prompts.options(tokens)
    table, by_length = measured.table, measured.by_length[arm.name]
    depth = arm.used_shape.depth
    policy = arm.policy or AdaptiveLength(first=depth, shortest=depth, longest=depth)
    noted = Noted(policy, [])
    ids = prompts.ids
    probes = arm.drafter.max_nodes(TreeShape())
    # the controller learns from text to text; how wide a forward with probes is, is only seen alone
    alone = isinstance(policy, Learning) or probes > 0
    size = 1 if alone else len(ids)
    emitted: list[int] = []
    widths: list[tuple[int, ...]] = []
    for first in range(0, len(ids), size):
        texts = prompts.prompts[first : first + size]
        run = time_decode(
            target, replace(arm, policy=noted), texts, options, ids[first : first + size]
        )
        emitted.extend(map(len, run.tokens))
        widths.append(run.widths)
    spent = []
    for number, row in enumerate(noted.rows):
        # the prompt's own step drafts, too; what reading the prompt costs is left out everywhere
        across = [1 + step.offered for step in row]
        if alone:
            across = [across[0] + (probes if row[0].asked else 0), *widths[number]]
        seconds = 0.0
        for step, width in zip(row, across, strict=True):
            idle = by_length.draft_D[0]
            draft = (
                table.draft_seconds(arm.name, prompts.cost_temperature, width)
                if step.asked
                else idle
            )
            other = by_length.other_D[min(step.offered, by_length.longest)]
            seconds += draft + other + table.target_seconds(width)
        spent.append(seconds / measured.plain)
    later = [step.offered for row in noted.rows for step in row[1:]]
    return Priced(
        seconds_P=np.array(spent), tokens_P=np.array(emitted), drafted=float(np.mean(later))
    )
