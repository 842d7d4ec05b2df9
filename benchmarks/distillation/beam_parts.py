"""The runs of DistillBeam's study, part by part (`distillbeam.py` says what each varies)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from lab import Lab
from study import Run

from draftsmith.commands.distill import DistillOptions
from draftsmith.data.suites import load_prompts
from draftsmith.distill.config import DivergenceConfig
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.requests import make_requests, make_settings
from draftsmith.provenance import write_json_atomic
from draftsmith.targets.hf import load_target

SOFT = ("kl", "rkl", "jsd", "hellinger", "tvd", "tvdpp", "lk")
WIDTHS = (2, 4, 8, 16)
"""Beside these the greedy text, which is the one best beam."""
GOLD = DivergenceConfig(tail="renormalise")
"""The paper's treatment of cut laws; the only one with a meaning at every temperature."""
TEMPERATURES = (0.7, 1.0, 2.0)
MORE = 4
"""Times the prompts of what is long, and its steps."""
LONGEST = 8
"""Times the steps of what is very long."""
COSTED_PROMPTS = 200
AT_EQUAL_COST = ("beams-auto", "beams-2", "beams-4", "beams-8", "draws-4", "draws-1")


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
    cut = [
        at_temperature(lab, objective, temperature)
        for objective in SOFT
        for temperature in TEMPERATURES
    ]
    return cut + [with_whole_laws(lab, objective) for objective in SOFT]


def at_temperature(lab: Lab, objective: str, temperature: float) -> Run:
    """On gold texts, with a teacher at this temperature."""
    change = replace(GOLD, teacher_temperature=temperature)
    return lab.run("gold", objective, change=change, name=f"t{temperature:g}")


def with_whole_laws(lab: Lab, objective: str, store: str = "gold") -> Run:
    """With all that the teacher says in place of the 50 best."""
    run = lab.run(store, objective, change=GOLD, name="whole")
    assert run.options is not None
    return replace(run, options=replace(run.options, laws="teacher"))


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
        changes: list[tuple[str, str, DivergenceConfig]] = []
        for objective in ("kl", "rkl"):
            for tail in ("bucket", "renormalise", "floor"):
                changes.append((objective, tail, DivergenceConfig(tail=tail)))
        for reading in ("exact", "sampled", "uniform"):
            changes.append(("tvdpp", reading, DivergenceConfig(reading=reading)))
        for objective, name, change in changes:
            made.append(
                lab.run(
                    "draws-1",
                    objective,
                    change=change,
                    seed=seed,
                    name="" if change == DivergenceConfig() else name,
                    label=f"{objective}, {name}",
                )
            )
    return made


def aggregate(lab: Lab) -> list[Run]:
    made = []
    for objective in ("kl", "rkl"):
        made.append(replace(lab.run("beams-8", objective), label=f"{objective}, per beam"))
        made += [mixed(lab, objective), scored(lab, objective)]
    return made


def mixed(lab: Lab, objective: str) -> Run:
    """Eight beams that teach their mean law."""
    return _eight(lab, objective, "mixture", lambda plain: replace(plain, aggregate="mixture"))


def scored(lab: Lab, objective: str) -> Run:
    """Eight beams that count by their scores."""
    return _eight(lab, objective, "score", lambda plain: replace(plain, beam_weights="score"))


def _eight(
    lab: Lab, objective: str, name: str, changed: Callable[[DistillOptions], DistillOptions]
) -> Run:
    plain = lab.run("beams-8", objective)
    assert plain.options is not None
    full = f"{plain.name}-{name}"
    options = replace(changed(plain.options), out=lab.work / "runs" / full / "draft")
    return replace(plain, name=full, options=options, label=f"{objective}, {name}")


def at_equal_cost(lab: Lab) -> list[Run]:
    """As many prompts for each way as the teacher reads the same number of tokens for."""
    costs = teacher_costs(lab)
    budget = costs["beams-2"] * lab.amounts.prompts
    return [
        lab.run(f"{name}@{int(budget / costs[name])}", "kl", label=f"kl, {name}, equal cost")
        for name in AT_EQUAL_COST
    ]


def prompts(lab: Lab) -> list[Run]:
    """What more prompts give that more trajectories of each do not."""
    many = MORE * lab.amounts.prompts
    return [
        longer(lab).run(store, "lk", label=f"lk, {store}, long")
        for store in (f"draws-1@{many}", "draws-1", f"draws-{MORE}", f"beams-{MORE}")
    ]


def length(lab: Lab) -> list[Run]:
    """What more training gives, of one text of each prompt and of four: by laws, by labels, and by
    whole laws."""
    many, long = MORE * lab.amounts.prompts, longer(lab, LONGEST)
    stores = [f"draws-{n}@{many}" for n in (1, MORE)]
    made = [
        long.run(store, objective, label=f"{objective}, {store}, very long")
        for objective in ("lk", "sft")
        for store in stores
    ]
    whole = [with_whole_laws(long, "lk", store) for store in stores]
    labels = [f"lk, {store}, whole laws, very long" for store in stores]
    return made + [replace(run, label=label) for run, label in zip(whole, labels, strict=True)]


def longer(lab: Lab, times: int = MORE) -> Lab:
    """With so many times the steps."""
    return replace(lab, amounts=replace(lab.amounts, steps=times * lab.amounts.steps))


def teacher_costs(lab: Lab) -> dict[str, float]:
    """Tokens that the teacher reads per prompt, over the first prompts; measured once."""
    path = costs_path(lab)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in AT_EQUAL_COST:
        if name not in known:
            options = lab.store(name)
            prompts = load_prompts(options.prompts, limit=min(COSTED_PROMPTS, lab.amounts.prompts))
            target = load_target(lab.models.target)
            backend = TransformersBackend(target, batch_size=options.batch_size)
            requests = make_requests(options, prompts, target.tokenizer)
            backend.collect(requests, make_settings(options))
            known[name] = backend.cost.tokens / len(prompts)
            write_json_atomic(path, known)
    return {name: known[name] for name in AT_EQUAL_COST}


def costs_are_known(lab: Lab) -> bool:
    """Whether `auto` can be planned without asking the teacher."""
    path = costs_path(lab)
    return (
        path.exists() and set(AT_EQUAL_COST) <= json.loads(path.read_text(encoding="utf-8")).keys()
    )


def costs_path(lab: Lab) -> Path:
    return lab.kept.path.with_name("teacher_costs.json")


PARTS: dict[str, Callable[[Lab], list[Run]]] = {
    "rate": rate,
    "temperature": temperature,
    "forcing": forcing,
    "sft": sft,
    "beams": beams,
    "draws": draws,
    "tails": tails,
    "aggregate": aggregate,
    "auto": at_equal_cost,
    "prompts": prompts,
    "length": length,
}


def planned(lab: Lab) -> list[Run]:
    """Every run of every part, and the draft that they begin with."""
    parts = [part for part in PARTS.values() if part is not at_equal_cost or costs_are_known(lab)]
    return list({run.name: run for run in [lab.models.base, *_all(parts, lab)]}.values())


def _all(parts: Iterable[Callable[[Lab], list[Run]]], lab: Lab) -> list[Run]:
    return [run for part in parts for run in part(lab)]
