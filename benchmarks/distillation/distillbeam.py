"""The study of DistillBeam, at the size of `models/mini-ende`, in the paper's order:

    python benchmarks/distillation/distillbeam.py                        # all, hours on two cores
    python benchmarks/distillation/distillbeam.py --only forcing,sft     # some parts

| part          | what varies                                                     | seeds |
|---------------|-----------------------------------------------------------------|-------|
| `rate`        | learning rates, for three objectives on drawn texts              | 1     |
| `temperature` | gold texts: teacher at 0.7, 1, 2, and whole laws, per divergence | 1     |
| `forcing`     | texts: gold, greedy, drawn, per divergence                       | 1     |
| `sft`         | hard labels on each of them                                      | 1     |
| `beams`       | 1, 2, 4, 8, 16 beams, per divergence                             | 1     |
| `draws`       | as many draws instead of beams (beyond the paper)                | 1     |
| `tails`       | what lies outside of the kept tokens; readings of TVD++          | 3     |
| `aggregate`   | each beam its own laws, their mixture, weights by score          | 1     |
| `auto`        | `--beams auto` and fixed widths at equal cost of the teacher     | 1     |
| `prompts`     | four times the prompts against four texts of each, long          | 1     |
| `length`      | eight times the steps on four times the prompts                  | 1     |
| `best`        | the best of several trajectories, of one, of hard labels         | 3     |

Runs have 3,000 prompts and 480 steps of 2,048 tokens, between five and six passes over one text of
each prompt; long ones have four times as many steps. `best` trains the best short run of each kind
as long as those of `length`, on as many prompts; the best of them and of `length` meet on fresh
prompts. An interrupted study continues when repeated, and parts that are run later join what is
recorded. Writes benchmarks/results/distillbeam.json and distillbeam/ (tables and figures).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ende
from claims import HEATS, SOFT, WIDTHS, as_table, at_heat, claims, judged, with_whole_laws
from lab import Amounts, Lab
from study import Examined, Models, Run, already_examined, collect, examine
from writing import as_row, difference, figures, places, plain, ranked, recorded, write_study

from draftsmith.bench.compare_figures import RunFigures
from draftsmith.bench.suites import load_prompts
from draftsmith.distill.collect import TransformersBackend
from draftsmith.option_groups import DivergenceOptions
from draftsmith.provenance import digest, write_json_atomic, write_text_atomic
from draftsmith.recipes.collect import make_requests, make_settings
from draftsmith.targets.hf import load_target
from draftsmith.types import TreeShape

RESULTS = Path(__file__).resolve().parents[1] / "results"
SEEDS = 3
MORE = 4
"""Times the prompts of what is long, and its steps."""
LONGEST = 8
"""Times the steps of what is very long."""
COSTED_PROMPTS = 200
FULL = Amounts(prompts=3000, exam_prompts=96, final_prompts=192, steps=480)
QUICK = Amounts(prompts=40, exam_prompts=8, final_prompts=8, steps=4)


# --------------------------------------------------------------------------- parts


def rate(lab: Lab) -> list[Run]:
    """Learning rates, for one hard, one mild and one bounded objective."""
    return [
        # the usual rate is a run of `forcing`: twice it would clash with itself
        replace(lab, learning_rate=value).run(
            "draws-1", objective, name="" if value == lab.learning_rate else f"rate{value:g}"
        )
        for objective in ("sft", "kl", "tvd")
        for value in (3e-4, 1e-3, 3e-3, 1e-2)
    ]


def temperature(lab: Lab) -> list[Run]:
    cut = [at_heat(lab, objective, heat) for objective in SOFT for heat in HEATS]
    return cut + [with_whole_laws(lab, objective) for objective in SOFT]


def forcing(lab: Lab) -> list[Run]:
    return [lab.run(s, objective) for objective in SOFT for s in ("gold", "greedy", "draws-1")]


def sft(lab: Lab) -> list[Run]:
    return [lab.run(store, "sft") for store in ("gold", "greedy", "draws-1")]


def beams(lab: Lab) -> list[Run]:
    return [lab.run(f"beams-{width}", objective) for objective in SOFT for width in WIDTHS]


def draws(lab: Lab) -> list[Run]:
    return [lab.run(f"draws-{n}", objective) for objective in SOFT for n in (4, 16)]


def tails(lab: Lab) -> list[Run]:
    made = []
    for seed in range(3):
        changes: list[tuple[str, str, DivergenceOptions]] = []
        for objective in ("kl", "rkl"):
            for tail in ("bucket", "renormalise", "floor"):
                changes.append((objective, tail, DivergenceOptions(tail=tail)))
        for reading in ("exact", "sampled", "uniform"):
            changes.append(("tvdpp", reading, DivergenceOptions(reading=reading)))
        for objective, name, change in changes:
            made.append(
                lab.run(
                    "draws-1",
                    objective,
                    change=change,
                    seed=seed,
                    name="" if change == DivergenceOptions() else name,
                    label=f"{objective}, {name}",
                )
            )
    return made


def aggregate(lab: Lab) -> list[Run]:
    made = []
    for objective in ("kl", "rkl"):
        plain = lab.run("beams-8", objective)
        assert plain.options is not None
        made.append(replace(plain, label=f"{objective}, per beam"))
        for name, options in (
            ("mixture", replace(plain.options, aggregate="mixture")),
            ("score", replace(plain.options, beam_weights="score")),
        ):
            full = f"{plain.name}-{name}"
            out = replace(options, out=lab.work / "runs" / full / "draft")
            made.append(replace(plain, name=full, options=out, label=f"{objective}, {name}"))
    return made


def auto(lab: Lab) -> list[Run]:
    """As many prompts for each way as the teacher reads the same number of tokens for."""
    names = ("beams-auto", "beams-2", "beams-4", "beams-8", "draws-4")
    costs = teacher_costs(lab, names)
    budget = min(costs.values()) * lab.amounts.prompts
    return [
        lab.run(f"{name}@{int(budget / costs[name])}", "kl", label=f"kl, {name}, equal cost")
        for name in names
    ]


def prompts(lab: Lab) -> list[Run]:
    """What more prompts give that more trajectories of each do not."""
    many = MORE * lab.amounts.prompts
    return [
        longer(lab).run(store, "lk", label=f"lk, {store}, long")
        for store in (f"draws-1@{many}", "draws-1", f"draws-{MORE}", f"beams-{MORE}")
    ]


def length(lab: Lab) -> list[Run]:
    """What training goes on to give, of one text of each prompt and of four."""
    many = MORE * lab.amounts.prompts
    return [
        longer(lab, LONGEST).run(f"{store}@{many}", "lk", label=f"lk, {store}@{many}, very long")
        for store in ("draws-1", f"draws-{MORE}")
    ]


def longer(lab: Lab, times: int = MORE) -> Lab:
    """With so many times the steps."""
    return replace(lab, amounts=replace(lab.amounts, steps=times * lab.amounts.steps))


def teacher_costs(lab: Lab, names: Sequence[str]) -> dict[str, float]:
    """Tokens that the teacher reads per prompt, over the first prompts."""
    path = lab.work / "teacher_costs.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    target = load_target(lab.models.target)
    for name in names:
        if name not in known:
            options = lab.store(name)
            prompts = load_prompts(options.prompts, limit=min(COSTED_PROMPTS, lab.amounts.prompts))
            backend = TransformersBackend(target, batch_size=options.batch_size)
            requests = make_requests(options, prompts, target.tokenizer)
            backend.collect(requests, make_settings(options))
            known[name] = backend.cost.tokens / len(prompts)
            write_json_atomic(path, known)
    return {name: known[name] for name in names}


PARTS: dict[str, Callable[[Lab], list[Run]]] = {
    "rate": rate,
    "temperature": temperature,
    "forcing": forcing,
    "sft": sft,
    "beams": beams,
    "draws": draws,
    "tails": tails,
    "aggregate": aggregate,
    "auto": auto,
    "prompts": prompts,
    "length": length,
}


CHOSEN_FROM = ("sft", "forcing", "beams", "draws")


def finalists(lab: Lab, rows: Sequence[dict[str, Any]]) -> list[Run]:
    """The best short run of each kind, trained for long, beside those of `length`: short runs do
    not tell several texts of a prompt from one."""
    tau = {row["name"]: row["mean_tau"] for row in rows}
    tried = [run for part in CHOSEN_FROM for run in PARTS[part](lab) if run.name in tau]
    best: dict[str, Run] = {}
    for run in sorted(tried, key=lambda run: tau[run.name]):
        best[kind_of(run)] = run
    return [*(at_length(lab, run) for run in best.values()), *length(lab)]


def kind_of(run: Run) -> str:
    """Learnt from several texts of a prompt, from one, or from hard labels."""
    assert run.options is not None
    if run.options.objective.objective == "sft":
        return "sft"
    return "several" if run.beams is not None and run.beams > 1 else "one"


def at_length(lab: Lab, run: Run) -> Run:
    """The same setting, trained for long on many prompts."""
    assert run.options is not None and run.name.endswith(f"-{lab.amounts.steps}-s0")
    steps = longer(lab, LONGEST).amounts.steps
    (store,) = run.options.store
    more = f"{store.name}@{MORE * lab.amounts.prompts}"
    words = run.name.removesuffix(f"-{lab.amounts.steps}-s0").removeprefix(store.name)
    name = f"{more}{words}-{steps}-s0"
    training = replace(run.options.training, duration=f"{steps}steps", warmup=max(1, steps // 20))
    options = replace(
        run.options,
        store=(store.with_name(more),),
        out=lab.work / "runs" / name / "draft",
        training=training,
        eval_every=max(1, steps // 4),
    )
    label = f"{run.options.objective.objective}, {more}, very long"
    return replace(run, name=name, options=options, label=label)


def with_seed(run: Run, seed: int) -> Run:
    """Once more, from other random numbers."""
    assert run.options is not None
    name = f"{run.name.removesuffix('-s0')}-s{seed}"
    out = run.options.out.parents[1] / name / "draft"
    return replace(run, name=name, options=replace(run.options, seed=seed, out=out))


def final(lab: Lab, rows: dict[str, dict[str, Any]], workers: int) -> dict[str, list[Examined]]:
    """The best of each kind after long training, with more seeds, on prompts that nothing was
    chosen by. `rows`: what is known by name; the finalists join them."""
    runs = finalists(lab, list(rows.values()))
    collect([lab.store(name) for name in stores_of(runs)], workers)
    done = examine(runs, lab.exam, lab.work, workers)
    rows |= {one.run.name: as_row(one) for one in done}
    best = {kind_of(run): run for run in sorted(runs, key=lambda run: rows[run.name]["mean_tau"])}
    chosen = {
        "undistilled": [lab.models.base],
        **{kind: [with_seed(run, seed) for seed in range(SEEDS)] for kind, run in best.items()},
    }
    every = [run for some in chosen.values() for run in some]
    marked = iter(examine(every, lab.final_exam, lab.work, workers))
    return {kind: [next(marked) for _ in some] for kind, some in chosen.items()}


# --------------------------------------------------------------------------- the whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--work", type=Path, default=ende.ROOT / "runs" / "distillbeam")
    parser.add_argument("--models", type=Path, default=ende.MODELS, help="target/ and draft/")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--no-best", action="store_true", help="leave out the long comparison")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    unknown = set(given.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only knows {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    work, out = places(given.work, given.out, quick=given.quick)
    lab = laboratory(given.models, work, quick=given.quick)
    lab.cost_ratio()
    runs = [lab.models.base, *(run for part in given.only.split(",") for run in PARTS[part](lab))]
    runs = list({run.name: run for run in runs}.values())
    collect([lab.store(name) for name in stores_of(runs)], given.workers)
    done = examine(runs, lab.exam, lab.work, given.workers)
    before = recorded(out / "distillbeam.json", facts(lab))
    rows = {row["name"]: row for row in before.get("runs", [])}
    rows |= {one.run.name: as_row(one) for one in done}
    finals = {} if given.no_best else final(lab, rows, given.workers)
    write(lab, list(rows.values()), {**before, **(answers(finals) if finals else {})}, out)


def laboratory(models: Path, work: Path, *, quick: bool) -> Lab:
    """Where the study works; its prompts are written once."""
    return Lab(
        models=Models(folder=models),
        work=work,
        learn=ende.training_prompts(work / "learn.jsonl", MORE * FULL.prompts),
        ask=ende.exam_prompts(work / "ask.jsonl"),
        amounts=QUICK if quick else FULL,
    )


def stores_of(runs: Sequence[Run]) -> list[str]:
    return sorted({folder.name for run in runs if run.options for folder in run.options.store})


def facts(lab: Lab) -> dict[str, Any]:
    """What must be the same for runs to stand in one table."""
    learn = [[prompt.id, prompt.text] for prompt in load_prompts(lab.learn)]
    return {**asdict(lab.amounts), "exam": lab.exam.key, "learn": digest(learn)}


def answers(finals: Mapping[str, Sequence[Examined]]) -> dict[str, Any]:
    """How the best of each kind compare."""
    marks = {kind: [one.marks for one in some] for kind, some in finals.items()}
    others = [kind for kind in ("undistilled", "one", "sft") if kind in marks]
    differences = [
        difference("several", marks["several"], other, marks[other])
        for other in others
        if "several" in marks
    ]
    for one in differences:
        print(
            f"{one.better} / {one.worse}: {one.ratio:.3f} ({one.low:.3f} to {one.high:.3f})",
            file=sys.stderr,
        )
    return {
        "best": {kind: [as_row(one) for one in some] for kind, some in finals.items()},
        "differences": plain(differences),
    }


def write(lab: Lab, rows: Sequence[dict[str, Any]], before: Mapping[str, Any], out: Path) -> None:
    """Figures and the answers to the study's questions."""
    ratio = lab.cost_ratio()
    claimed = judgements(lab, before.get("claims", []))
    write_study(
        out,
        "distillbeam",
        compared(rows, ratio, lab.amounts.steps),
        {
            **facts(lab),
            "cost_ratio": ratio,
            "runs": ranked(rows),
            "best": before.get("best", {}),
            "differences": before.get("differences", []),
            "claims": claimed,
        },
    )
    write_text_atomic(out / "distillbeam" / "claims.md", as_table(claimed))


def judgements(lab: Lab, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All claims whose runs are here, whichever call made them; others as they were recorded."""
    every = claims(lab)
    runs = {run.name: run for claim in every for run in claim.runs}
    marks = {one.run.name: one.marks for one in already_examined(runs.values(), lab.exam, lab.work)}
    found = {one["says"]: one for one in (*before, *judged(every, marks))}
    return [found[claim.says] for claim in every if claim.says in found]


def compared(rows: Sequence[Mapping[str, Any]], cost_ratio: float, steps: int) -> list[RunFigures]:
    """What stands in the comparison: runs of so many steps and the draft that they began with,
    decoded with chains at temperature 1."""
    short = [row for row in rows if row.get("duration") in (None, f"{steps}steps")]
    shape = TreeShape.chain(8)
    measured = [
        figures(row, shape, 1.0, target="mini-ende", cost_ratio=cost_ratio) for row in short
    ]
    return [*measured, *(_as_beam(one) for one in measured if one.forcing == "greedy")]


def _as_beam(one: RunFigures) -> RunFigures:
    """The greedy text is the one best beam."""
    return replace(one, forcing="beam", label=f"{one.label}, as a beam")


if __name__ == "__main__":
    main()
