"""What the study of drafters trains, on what, and what it is called.

greedy, draws-4, beams-4           collections: hidden states behind the final norm, top-50 laws
greedy-eagle3                      the texts of `greedy` with the states that EAGLE-3 reads
griffin-draws-4-lk-w1-300-s0       a run: kind, collection, objective, weight, rate, options,
                                   steps, seed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path

import ende
from evaluation import Evaluation, write_prompts
from study import Evaluated, Models, Run, collect, examine, training

from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.core.types import TreeShape
from draftsmith.data.suites import held_out_prompts, training_prompts
from draftsmith.distill.config import DivergenceConfig, ImitationConfig, KeptConfig, ScaleConfig
from draftsmith.drafters.hidden.drafter import FeatureDrafter
from draftsmith.drafters.registry import drafter_class
from draftsmith.targets.config import ModelConfig

CHAIN = TreeShape.chain(5)
DRAWN = TreeShape(widths=(4, 2, 2, 1))
"""At T = 1 its children are draws; those of trees that grow are the top tokens."""
DYNAMIC = FeatureDrafter.default_shape
"""EAGLE-2's tree."""
BATCH_TOKENS = 2048
LEARNING_RATE = 3e-3
"""The rate of all drafters; the part `rates` of the study compares it with others."""


COMMON = ("seed", "recompute")
"""Options of drafters that are no part of a setting."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much of everything."""

    prompts: int
    """Prompts whose texts are trained on."""
    choosing_prompts: int
    """Prompts of the evaluation that chooses settings."""
    final_prompts: int
    """Prompts of the evaluation whose metrics are reported."""
    exam_tokens: int
    steps: int
    seeds: int
    timed_prompts: int
    timed_repeats: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is special about a pair of models."""

    learn: Callable[[Path, int], Path]
    """Writes so many prompts; those behind the ones that are learnt from choose settings."""
    ask: Callable[[Path, int], Path]
    """Writes at least so many prompts that nobody has learnt from."""
    answer_tokens: int
    block_length: int
    """Holds a prompt and its answer."""


def _code(path: Path, count: int) -> Path:
    return write_prompts(path, islice(training_prompts(), count))


def _held_out_code(path: Path, count: int) -> Path:
    return write_prompts(path, held_out_prompts(count))


def _sentences(path: Path, count: int) -> Path:
    return ende.exam_prompts(path)


SUBJECTS = {
    "mini-code": Subject(learn=_code, ask=_held_out_code, answer_tokens=128, block_length=512),
    "mini-ende": Subject(
        learn=ende.training_prompts, ask=_sentences, answer_tokens=96, block_length=256
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A drafter to be trained. `token_weight` None: as it is published."""

    kind: str
    forcing: str = "greedy"
    objective: str = "kl"
    token_weight: float | None = None
    rate: float = LEARNING_RATE
    options: tuple[str, ...] = ()
    """--drafter-option"""
    tree: TreeShape = DYNAMIC

    @property
    def store(self) -> str:
        """Only EAGLE-3 reads other states than the last."""
        return f"{self.forcing}-eagle3" if self.kind == "eagle3" else self.forcing

    @property
    def name(self) -> str:
        objective = "" if self.objective == "kl" else self.objective
        weight = "" if self.token_weight is None else f"w{self.token_weight:g}"
        rate = "" if self.rate == LEARNING_RATE else f"lr{self.rate:g}"
        words = (self.kind, self.forcing, objective, weight, rate, *self.options)
        return "-".join(word.replace("=", "_") for word in words if word)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a training."""

    share: float
    """Share of the steps."""
    forwards: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Where the study works, and on what."""

    models: Models
    work: Path
    amounts: Amounts
    workers: int
    chosen: str | None = None
    """Best of `combination` on another target: nothing is chosen on this one."""

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.models.folder.name]

    @property
    def learn(self) -> Path:
        many = self.amounts.prompts + self.amounts.choosing_prompts
        return self.subject.learn(self.work / "learn.jsonl", many)

    @property
    def choosing(self) -> Evaluation:
        """On prompts that come behind those that are learnt from."""
        return replace(
            self._exam(self.learn, self.amounts.choosing_prompts), skip=self.amounts.prompts
        )

    @property
    def final(self) -> Evaluation:
        """On prompts that nothing was learnt from and nothing chosen by."""
        ask = self.subject.ask(self.work / "ask.jsonl", self.amounts.final_prompts)
        return self._exam(ask, self.amounts.final_prompts)

    def _exam(self, prompts: Path, limit: int) -> Evaluation:
        return Evaluation(
            target=self.models.target,
            prompts=prompts,
            limit=limit,
            max_new_tokens=self.amounts.exam_tokens,
            chains=(CHAIN.depth,),
            tree=DRAWN.widths,
        )

    def store(self, name: str) -> CollectOptions:
        """The collection of this name."""
        forcing = name.removesuffix("-eagle3")
        kind, _, number = forcing.partition("-")
        bare = CollectOptions(
            model=ModelConfig(target=self.models.target),
            prompts=self.learn,
            out=self.work / "stores" / name,
            kept=KeptConfig(top_k=50, features="last" if forcing == name else "eagle3"),
            max_new_tokens=self.subject.answer_tokens,
            batch_size=64,
            scale=ScaleConfig(shard_size=100),
            limit=self.amounts.prompts,
        )
        ways: dict[str, Callable[[], CollectOptions]] = {
            "greedy": lambda: bare,
            "draws": lambda: replace(bare, samples=int(number)),
            "beams": lambda: replace(bare, beams=int(number)),
        }
        return ways[kind]()

    def run(self, setting: Setting, seed: int = 0) -> Run:
        """A training with this seed: of the first weights and of the order of texts."""
        steps = self.amounts.steps
        name = f"{setting.name}-{steps}-s{seed}"
        known = {field.name for field in fields(drafter_class(setting.kind).Config)}
        common = dict(zip(COMMON, (seed, "false"), strict=True))
        own = tuple(f"{key}={value}" for key, value in common.items() if key in known)
        return Run(
            name=name,
            options=DistillOptions(
                target=self.models.target,
                drafter=setting.kind,
                drafter_option=(*setting.options, *own),
                store=(self.work / "stores" / setting.store,),
                objective=DivergenceConfig(objective=setting.objective),
                imitation=ImitationConfig(token_weight=setting.token_weight),
                training=training(
                    steps,
                    block_length=self.subject.block_length,
                    batch_tokens=BATCH_TOKENS,
                    rate=setting.rate,
                ),
                out=self.work / "runs" / name / "draft",
                eval_every=max(1, steps // 3),
                seed=seed,
            ),
            tree=setting.tree,
        )

    def staged(self, setting: Setting, stages: Sequence[Stage], seed: int) -> list[Run]:
        """Each goes on from the one before; the last is the drafter."""
        made: list[Run] = []
        for stage in stages:
            amounts = replace(self.amounts, steps=int(stage.share * self.amounts.steps))
            options = (*setting.options, f"num_forwards={stage.forwards}")
            own = replace(setting, options=options, rate=stage.rate)
            run = replace(self, amounts=amounts).run(own, seed)
            if made and run.options:
                name = f"{made[-1].name}+{run.name}"
                folder = self.work / "runs" / name / "draft"
                said = run.options.drafter_option
                # the first weights are there already
                trained = tuple(one for one in said if one.partition("=")[0] != "seed")
                again = replace(
                    run.options, drafter=made[-1].drafter, drafter_option=trained, out=folder
                )
                run = replace(run, name=name, options=again)
            made.append(run)
        return made

    def seeds(self, setting: Setting) -> list[Run]:
        return [self.run(setting, seed) for seed in range(self.amounts.seeds)]

    def collect(self, runs: Sequence[Run]) -> None:
        """What these learn from, if it is not there yet."""
        names = {store.name for run in runs if run.options for store in run.options.store}
        collect([self.store(name) for name in sorted(names)], self.workers)

    def examine(
        self, groups: Mapping[str, Sequence[Run]], exam: Evaluation
    ) -> dict[str, list[Evaluated]]:
        """Collect, train and examine what is not done yet.

        A drafter that is examined in two trees is trained once, so these take turns.
        """
        waiting = [run for some in groups.values() for run in some]
        self.collect(waiting)
        while waiting:
            turn = {run.name: run for run in reversed(waiting)}
            examine(list(reversed(turn.values())), exam, self.work, self.workers)
            waiting = [run for run in waiting if run is not turn[run.name]]
        return {
            label: examine(some, exam, self.work, self.workers) for label, some in groups.items()
        }
