"""Where a study works, how much of everything, and what its collections and runs are called.

greedy, gold, draws-N, beams-N, beams-auto         collections
beams-8-rkl-400-s0                                 a run: collection, objective, steps, seed
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation import Evaluation
from kept import Kept
from study import Evaluated, Models, Run, collect, examine, is_trained, train, training

from draftsmith.bench.costs import ForwardProbe
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.distill.config import DivergenceConfig
from draftsmith.errors import InputError
from draftsmith.provenance import digest, write_json_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import load_target


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much of everything."""

    prompts: int
    exam_prompts: int
    final_prompts: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Where a study works, and on what."""

    models: Models
    work: Path
    learn: Path
    """Prompts whose answers are learnt."""
    ask: Path
    """Prompts of the exams."""
    amounts: Amounts
    kept: Kept
    """Scores of all machines; what else is measured once stands beside them."""
    learning_rate: float = 1e-3
    max_new_tokens: int = 96

    @property
    def exam(self) -> Evaluation:
        """What settings are chosen by."""
        return Evaluation(
            target=self.models.target,
            prompts=self.ask,
            limit=self.amounts.exam_prompts,
            max_new_tokens=self.max_new_tokens,
            tree=(),
        )

    @property
    def final_exam(self) -> Evaluation:
        """On other prompts: what was chosen for its marks there would seem better than it is. And
        with a tree, too."""
        return replace(
            self.exam,
            skip=self.amounts.exam_prompts,
            limit=self.amounts.final_prompts,
            tree=(4, 2, 2, 1),
        )

    def store(self, name: str) -> CollectOptions:
        """The collection of this name."""
        way, _, limit = name.partition("@")
        kind, _, number = way.partition("-")
        bare = CollectOptions(
            model=ModelConfig(target=self.models.target),
            prompts=self.learn,
            out=self.work / "stores" / name,
            max_new_tokens=self.max_new_tokens,
            batch_size=64,
            limit=int(limit or self.amounts.prompts),
        )
        ways: dict[str, Callable[[], CollectOptions]] = {
            "gold": lambda: replace(bare, gold=True),
            "greedy": lambda: bare,
            "draws": lambda: replace(bare, samples=int(number)),
            "beams": lambda: replace(bare, beams="auto" if number == "auto" else int(number)),
        }
        return ways[kind]()

    def run(
        self,
        store: str,
        objective: str,
        *,
        change: DivergenceConfig | None = None,
        seed: int = 0,
        name: str = "",
        label: str | None = None,
    ) -> Run:
        """A distillation from this collection. `change`: other than plain divergence options."""
        steps = self.amounts.steps
        kind, _, number = store.partition("@")[0].partition("-")
        name = "-".join(filter(None, (store, objective, name, str(steps), f"s{seed}")))
        return Run(
            name=name,
            options=DistillOptions(
                target=self.models.target,
                drafter=self.models.draft,
                store=(self.work / "stores" / store,),
                objective=replace(change or DivergenceConfig(), objective=objective),
                training=training(
                    steps, block_length=256, batch_tokens=2048, rate=self.learning_rate
                ),
                out=self.work / "runs" / name / "draft",
                eval_every=max(1, steps // 4),
                seed=seed,
            ),
            forcing={"draws": "sample", "beams": "beam"}.get(kind, kind),
            beams=int(number) if number.isdigit() else None if number else 1,
            label=label,
        )

    def cost_ratio(self) -> float:
        """Seconds of a forward of the draft model / of the target, one token; measured once, before
        runs side by side keep the machine busy."""
        path = self.kept.path.with_name("cost_ratio.json")
        if not path.exists():
            context = tuple(range(1, 65))
            probes = [
                ForwardProbe(load_target(m), context, 1)
                for m in (self.models.draft, self.models.target)
            ]
            rounds = [[probe.seconds(1) for probe in probes] for _ in range(100)]
            own, other = (statistics.median(column) for column in zip(*rounds[20:], strict=True))
            write_json_atomic(path, {"draft_ms": 1e3 * own, "target_ms": 1e3 * other})
        known = json.loads(path.read_text(encoding="utf-8"))
        return float(known["draft_ms"] / known["target_ms"])

    def examine(self, runs: Sequence[Run], exam: Evaluation, workers: int) -> list[Evaluated]:
        """All runs with their marks; what no machine has made yet is collected, trained and
        examined."""
        known = self.known(runs, exam)
        missing = list({run.name: run for run in runs if run.name not in known}.values())
        self._collect(missing, workers)
        examine(
            missing,
            exam,
            self.work,
            workers,
            lambda one: self.kept.add(one.run, exam, one.marks),
        )
        known |= self.known(missing, exam)
        return [known[run.name] for run in runs]

    def train(self, runs: Sequence[Run], workers: int) -> None:
        """Have their drafts here, whoever has examined them."""
        self._collect(runs, workers)
        train(runs, self.work, workers)

    def _collect(self, runs: Sequence[Run], workers: int) -> None:
        """What those of the runs learn from that are not trained here."""
        stores = stores_of([run for run in runs if not is_trained(run)])
        collect([self.store(name) for name in stores], workers)

    def known(self, runs: Sequence[Run], exam: Evaluation) -> dict[str, Evaluated]:
        """Those of the runs that have sat the exam, by name, in their order."""
        marks = {run.name: (run, self.kept.find(run, exam)) for run in runs}
        return {
            name: Evaluated(run=run, marks=found)
            for name, (run, found) in marks.items()
            if found is not None
        }


def with_seed(run: Run, seed: int) -> Run:
    """Once more, from other random numbers."""
    assert run.options is not None
    name = f"{run.name.removesuffix('-s0')}-s{seed}"
    out = run.options.out.parents[1] / name / "draft"
    return replace(run, name=name, options=replace(run.options, seed=seed, out=out))


def stores_of(runs: Sequence[Run]) -> list[str]:
    """Names of what they learn from."""
    return sorted({folder.name for run in runs if run.options for folder in run.options.store})


def keep(record: Path, work: Path, models: Models, files: Sequence[Path], prompts: int) -> Kept:
    """What is known of a study with these models, files of prompts and so many prompts to learn
    from.

    Raises:
        InputError: the folder to work in is of other ones.
    """
    weights = [Path(folder) / "model.safetensors" for folder in (models.target, models.draft)]
    of = digest([*map(_hash, (*weights, *files)), prompts])
    note = work / "of.json"
    if not note.exists():
        write_json_atomic(note, of)
    if json.loads(note.read_text(encoding="utf-8")) != of:
        raise InputError(
            f"{work} was begun with other models or prompts: remove it, or name another (--work)"
        )
    return Kept(path=record / "marks.jsonl", of=of)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
