"""The study of Direct Alignment, on `models/mini-code`: a small target that continues Python code.

    python benchmarks/distillation/alignment.py [--only losses,steps,...] [--workers 2]

Three phases as in the paper: a pre-trained draft (the shipped one), answers of the target at
temperatures 0, 0.3, 0.7 and 1 with top-p 0.95, fine-tuning on its laws beside pre-training text.

| part       | what varies                                                              | seeds |
|------------|--------------------------------------------------------------------------|-------|
| `losses`   | KLD, TVD, TVD++ (`exact` and `uniform`) at the full number of steps      | 3     |
| `steps`    | each of them with a quarter and a half of the steps, warm-up and all     | 1     |
| `random`   | the same from random weights instead of a pre-trained draft              | 1     |
| `unmixed`  | without the pre-training text in every batch (9:1 otherwise)             | 1     |
| `outside`  | with answers to prose prompts among those to code                        | 1     |

Tasks: library code and its tests, greedy; library code at temperature 0.6, top-p 0.9 (open-ended);
English prose, greedy: out of the distribution of what drafts were tuned on. An interrupted study
continues when repeated. Prose is read from ../shared/data; without it, prose is left out. Writes
benchmarks/results/alignment.json and alignment/.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from alignment_plots import BASE, Bar, save_pictures
from evaluation import Evaluation, loop_shares, write_prompts
from study import Evaluated, Models, Run, collect, examine, training
from writing import difference, places, plain, table, write_study

from draftsmith.bench.compare.model import pool
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.core.speedup import memory_bound_speedup
from draftsmith.core.types import TreeShape
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import (
    held_out_prompts,
    training_prompts,
    training_texts,
)
from draftsmith.distill.config import DivergenceConfig, KeptConfig
from draftsmith.provenance import write_text_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import load_model, load_target

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BOOKS = ROOT.parent / "shared" / "data" / "text" / "gutenberg"
GAMMAS = (3, 5)
LOSSES = {
    "kl": DivergenceConfig(objective="kl"),
    "tvd": DivergenceConfig(objective="tvd"),
    "tvdpp": DivergenceConfig(objective="tvdpp", reading="exact"),
    "tvdpp-uniform": DivergenceConfig(objective="tvdpp", reading="uniform"),
}
SEEDS = 3
PROSE_WORDS = 60
TEXT_CHARACTERS = 3_000_000
"""Length of the pre-training text: several times what any run reads."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much of everything."""

    prompts: int
    exam_prompts: int
    """Per task, as far as the held-out files go: those of library code have 27."""
    tokens: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Lab:
    """Where the study works, and on what."""

    work: Path
    models: Models
    amounts: Amounts

    # ---------------------------------------------------------------- prompts

    @property
    def tasks(self) -> dict[str, Evaluation]:
        """Exams by name; prose is missing where the books are."""
        held = held_out_prompts(100 * self.amounts.exam_prompts)
        library = [p for p in held if "test" not in p.id][: self.amounts.exam_prompts]
        tests = [p for p in held if "test" in p.id][: self.amounts.exam_prompts]
        code = self._file("library", library)
        out = {
            "library": self._exam(code, (0.0,)),
            "library, open-ended": self._exam(code, (0.6,), top_p=0.9),
            "tests": self._exam(self._file("tests", tests), (0.0,)),
        }
        prose = self.prose(held_out=True)
        if prose:
            out["prose"] = self._exam(
                self._file("prose", prose[: self.amounts.exam_prompts]), (0.0,)
            )
        return out

    def _exam(
        self, prompts: Path, temperatures: tuple[float, ...], top_p: float = 1.0
    ) -> Evaluation:
        return Evaluation(
            target=self.models.target,
            prompts=prompts,
            limit=self.amounts.exam_prompts,
            max_new_tokens=self.amounts.tokens,
            chains=GAMMAS,
            tree=(),
            temperatures=temperatures,
            top_p=top_p,
        )

    def _file(self, name: str, prompts: Iterable[Prompt]) -> Path:
        return write_prompts(self.work / f"{name}.jsonl", prompts)

    def prose(self, *, held_out: bool) -> list[Prompt]:
        """Beginnings of paragraphs; the exam's are from other books than those learnt from."""
        found = []
        for number, path in enumerate(sorted(BOOKS.glob("*.txt.xz"))):
            if (number % 4 == 0) != held_out:
                continue
            text = lzma.decompress(path.read_bytes()).decode("utf-8", errors="ignore")
            paragraphs = [" ".join(p.split()) for p in text.replace("\r", "").split("\n\n")]
            long = [p for p in paragraphs if len(p.split()) > 2 * PROSE_WORDS]
            found.append(
                [
                    Prompt(id=f"{path.name}:{at}", text=" ".join(p.split()[:PROSE_WORDS]))
                    for at, p in enumerate(long[::3])
                ]
            )
        return [book[at] for at in range(200) for book in found if at < len(book)]

    # ---------------------------------------------------------------- runs

    def store(self, name: str) -> CollectOptions:
        """Answers to `code` or `prose` prompts, as the paper draws them."""
        known = {"code": training_prompts(), "prose": iter(self.prose(held_out=False))}
        count = self.amounts.prompts if name == "code" else self.amounts.prompts // 4
        return CollectOptions(
            model=ModelConfig(target=self.models.target),
            prompts=self._file(f"learn-{name}", islice(known[name], count)),
            out=self.work / "stores" / name,
            samples=1,
            temperatures="0,0.3,0.7,1",
            top_p=0.95,
            max_new_tokens=self.amounts.tokens,
            batch_size=64,
            kept=KeptConfig(top_k=0),  # whole laws, as in the paper
        )

    def run(
        self,
        loss: str,
        *,
        seed: int = 0,
        share: float = 1.0,
        stores: tuple[str, ...] = ("code",),
        mixed: bool = True,
        drafter: str | None = None,
        label: str = "",
    ) -> Run:
        steps = max(1, round(share * self.amounts.steps))
        name = "-".join(filter(None, (loss, label, str(steps), f"s{seed}")))
        return Run(
            name=name,
            options=DistillOptions(
                target=self.models.target,
                drafter=drafter or self.models.draft,
                store=tuple(self.work / "stores" / store for store in stores),
                objective=LOSSES[loss],
                text=(self.beside(),) if mixed else (),
                training=replace(
                    training(steps, block_length=512, batch_tokens=10 * 512, rate=1e-3),
                    warmup=max(1, steps // 10),  # as in the paper, here and in the next line
                    schedule="linear",
                ),
                out=self.work / "runs" / name / "draft",
                eval_every=max(1, steps // 2),
                seed=seed,
            ),
            forcing="sample",
            beams=1,
            label=name.removesuffix(f"-s{seed}"),
        )

    def beside(self) -> str:
        """The pre-training text: files that no prompt of an exam is from."""
        path = self.work / "library_text.jsonl"
        if not path.exists():
            lines: list[str] = []
            for text in training_texts():
                if sum(map(len, lines)) > TEXT_CHARACTERS:
                    break
                lines.append(json.dumps({"text": text}) + "\n")
            write_text_atomic(path, "".join(lines))
        return str(path)

    @property
    def unlearnt(self) -> str:
        """The draft's architecture with random weights."""
        folder = self.work / "random-draft"
        if not (folder / "config.json").is_file():
            model = load_model(self.models.draft, dtype="float32")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                fresh = type(model)(model.config)
            fresh.save_pretrained(folder)
            load_target(self.models.draft).tokenizer.save_pretrained(folder)
        return str(folder)


def losses(lab: Lab) -> list[Run]:
    return [lab.run(loss, seed=seed) for loss in LOSSES for seed in range(SEEDS)]


def steps(lab: Lab) -> list[Run]:
    return [lab.run(loss, share=share) for loss in LOSSES for share in (0.25, 0.5, 1.0)]


def random(lab: Lab) -> list[Run]:
    return [
        lab.run("tvdpp", drafter=lab.unlearnt, label="random"),
        lab.run("kl", drafter=lab.unlearnt, label="random"),
    ]


def unmixed(lab: Lab) -> list[Run]:
    return [lab.run(loss, mixed=False, label="unmixed") for loss in LOSSES]


def outside(lab: Lab) -> list[Run]:
    if not lab.prose(held_out=False):
        return []
    return [lab.run(loss, stores=("code", "prose"), label="with-prose") for loss in LOSSES]


PARTS: dict[str, Callable[[Lab], list[Run]]] = {
    "losses": losses,
    "steps": steps,
    "random": random,
    "unmixed": unmixed,
    "outside": outside,
}
FULL = Amounts(prompts=1000, exam_prompts=48, tokens=128, steps=400)
QUICK = Amounts(prompts=8, exam_prompts=2, tokens=8, steps=4)


def bars(lab: Lab, done: Mapping[str, Sequence[Evaluated]]) -> list[Bar]:
    """Every setting on every task: tau and memory-bound speed-up, pooled over seeds."""
    sizes = [_parameters(folder) for folder in (lab.models.draft, lab.models.target)]
    out = []
    for task, some in done.items():
        for name, seeds in grouped(some).items():
            for gamma in GAMMAS:
                shape = TreeShape.chain(gamma)
                taus = [one.marks.tau(shape, one.marks.decoded[0].temperature) for one in seeds]
                tau = pool(taus)
                speedup = float(memory_bound_speedup(statistics.mean(taus), gamma, *sizes))
                out.append(
                    Bar(task=task, name=name, gamma=gamma, tau=tau, memory_bound_speedup=speedup)
                )
    return out


def differences(done: Mapping[str, Sequence[Evaluated]], steps: int) -> list[dict[str, Any]]:
    """On every task, of what was trained for so many steps: each setting over the undistilled
    draft, each loss over those before it, and each change over the same loss without it."""
    out = []
    for task, some in done.items():
        marks = {name: [one.marks for one in seeds] for name, seeds in grouped(some).items()}
        made = [
            difference(better, marks[better], worse, marks[worse])
            for better in marks
            if better.endswith(f"-{steps}")
            for worse in rivals(better, steps)
            if worse in marks
        ]
        out += [{"task": task} | one for one in plain(made)]
    return out


def rivals(name: str, steps: int) -> list[str]:
    """What a setting is compared with."""
    loss = max((one for one in LOSSES if name.startswith(f"{one}-")), key=len)
    own = f"{loss}-{steps}"
    before = list(LOSSES)[: list(LOSSES).index(loss)] if name == own else [loss]
    return [BASE, *(f"{one}-{steps}" for one in before)]


def grouped(some: Sequence[Evaluated]) -> dict[str, list[Evaluated]]:
    """Seeds of a setting together."""
    groups: dict[str, list[Evaluated]] = {}
    for one in some:
        groups.setdefault(one.run.label or one.run.name, []).append(one)
    return groups


def _parameters(folder: str) -> int:
    return sum(p.numel() for p in load_model(folder, dtype="bfloat16").parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "alignment")
    parser.add_argument("--models", type=Path, default=ROOT / "models" / "mini-code")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    parts = given.only.split(",")
    whole = set(parts) == set(PARTS)
    # some parts are no study: they would take the place of the whole one's record
    out = given.out if whole or given.out != RESULTS else given.work / "results"
    work, out = places(given.work, out, quick=given.quick)
    lab = Lab(
        work=work,
        models=Models(folder=given.models),
        amounts=QUICK if given.quick else FULL,
    )
    chosen = [run for part in parts for run in PARTS[part](lab)]
    runs = list({run.name: run for run in [lab.models.base, *chosen]}.values())
    stores = {folder.name for run in runs if run.options for folder in run.options.store}
    collect([lab.store(name) for name in sorted(stores)], given.workers)
    done = {task: examine(runs, exam, lab.work, given.workers) for task, exam in lab.tasks.items()}
    made = bars(lab, done)
    save_pictures(made, lab.amounts.steps, out / "alignment")
    for bar in made:
        print(
            f"{bar.task}, {bar.name}, gamma {bar.gamma}: tau {bar.tau.mean:.3f}, "
            f"memory-bound {bar.memory_bound_speedup:.3f}x",
            file=sys.stderr,
        )
    facts: dict[str, Any] = {
        "steps": lab.amounts.steps,
        "prompts": lab.amounts.prompts,
        "exam_prompts": lab.amounts.exam_prompts,
        "exam_prompts_used": {task: len(exam.read()) for task, exam in lab.tasks.items()},
        "loop_share": {task: loop_shares(exam) for task, exam in lab.tasks.items()},
        "bars": [bar.as_json() for bar in made],
        "differences": differences(done, lab.amounts.steps),
        "tasks": {task: table(some) for task, some in done.items()},
    }
    write_study(out, "alignment", [], facts)


if __name__ == "__main__":
    main()
