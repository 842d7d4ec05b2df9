"""The parts of the study of drafters: which runs, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

from evaluation import Decoded, Scores
from study import Evaluated, Run, train
from writing import Pick, difference, interval, plain

from drafters.rows import TEMPERATURES, as_row, worth
from drafters.runs import DYNAMIC, LEARNING_RATE, Lab, Setting, Stage
from draftsmith.core.types import TreeShape
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.prompt_lookup import PromptLookup

STATIC = TreeShape(
    paths=tuple(
        tuple(int(rank) for rank in path)
        for path in (
            *("0", "1", "2", "3"),
            *("00", "01", "02", "10", "11", "20", "21", "30"),
            *("000", "001", "002", "010", "011", "020", "021", "100"),
            *("0000", "0001", "0002"),
            *("00000", "00001"),
        )
    )
)
"""EAGLE-1's tree of 25 nodes, five deep."""

GRIFFIN = Setting(kind="griffin")
HASS = Setting(kind="hass")
TRAINED = {
    "Medusa": Setting(kind="medusa", tree=Medusa.default_shape),
    "EAGLE-1": Setting(kind="eagle", tree=STATIC),
    "EAGLE-2": Setting(kind="eagle"),
    "FSPAD": Setting(kind="fspad"),
    "HASS": HASS,
    "EAGLE-3": Setting(kind="eagle3"),
    "GRIFFIN": GRIFFIN,
}
OBJECTIVES: dict[str, tuple[str, float | None]] = {
    "KL": ("kl", None),
    "KL (weight 1)": ("kl", 1.0),
    "LK": ("lk", None),
    "LK (weight 1)": ("lk", 1.0),
    "TVD": ("tvd", None),
    "TVD++": ("tvdpp", None),
    "JSD": ("jsd", None),
    "Hellinger": ("hellinger", None),
}
"""Objective and token weight; None: the published weight, 0.1."""
NETWORKS = {"FSPAD": tuple(OBJECTIVES), "GRIFFIN": ("KL", "LK")}
"""Objectives tried with each: in `methods` FSPAD's was best on held-out texts, after as many tokens
and in a third of the time."""
COMBINED = {
    f"{network} + {label}, {forcing}": Setting(
        kind=TRAINED[network].kind,
        forcing=forcing,
        objective=OBJECTIVES[label][0],
        token_weight=OBJECTIVES[label][1],
    )
    for network, labels in NETWORKS.items()
    for label in labels
    for forcing in ("greedy", "draws-4", "beams-4")
}
ABLATIONS = {
    "GRIFFIN": {
        "without token-guided fusion": Setting(kind="griffin", options=("guided_fusion=false",)),
        "without token-enhanced head": Setting(kind="griffin", options=("enhanced_head=false",)),
        "without mask": Setting(kind="griffin", options=("mask_top=0",)),
        "draft tokens in place of the text's": Setting(kind="griffin", options=("feeds=draft",)),
        **{
            f"mask: top {top}": Setting(kind="griffin", options=(f"mask_top={top}",))
            for top in (1, 5, 10)
        },
        "mask where the released code has it": Setting(
            kind="griffin", options=("mask_shift=official",)
        ),
        "attention of the released code": Setting(kind="griffin", options=("attention=official",)),
        **{
            f"GRIFFIN, forwards: {count}": Setting(
                kind="griffin", options=(f"num_forwards={count}",)
            )
            for count in (1, 2, 4)
        },
    },
    "HASS": {
        "HASS, attention of the released code": Setting(
            kind="hass", options=("attention=official",)
        ),
        **{
            f"HASS, forwards: {count}": Setting(kind="hass", options=(f"num_forwards={count}",))
            for count in (1, 2, 4)
        },
    },
}
"""By what they are compared with, which has three forwards and masks by the top 3."""
STAGES = {
    "HASS": (Stage(0.5, 1, LEARNING_RATE), Stage(0.5, 3, LEARNING_RATE / 3)),
    "GRIFFIN": (
        Stage(0.5, 1, LEARNING_RATE),
        Stage(0.25, 2, 0.6 * LEARNING_RATE),
        Stage(0.25, 3, 0.6 * LEARNING_RATE),
    ),
}
"""Training forwards that grow, with rates that fall by the published factors. Published HASS has
three forwards in both stages, and the first stages of both have no top-10 term."""
RATES = (3e-4, 1e-3, 1e-2)
"""Learning rates beside the one of all drafters."""
ORDER = ("GRIFFIN", "HASS", "FSPAD", "EAGLE-2")
"""As the paper of GRIFFIN has them, the best first."""
LONGER = 4
"""Times the steps."""
LONGER_SEEDS = 1


def methods(lab: Lab) -> dict[str, Any]:
    """All drafters with their published losses, on the same texts and as many tokens."""
    done = lab.examine(method_runs(lab), lab.final)
    return {
        "rows": [as_row(lab, label, some) for label, some in done.items()],
        "differences": [
            one
            for label in TRAINED
            if label != "GRIFFIN"
            for one in differences("GRIFFIN", done["GRIFFIN"], label, done[label])
        ],
    }


def method_runs(lab: Lab) -> dict[str, list[Run]]:
    own = {
        "plain": Run(name="plain", given="none", tree=TreeShape()),
        "PLD": Run(name="pld", given="prompt_lookup", tree=PromptLookup().default_shape),
        "Lookahead": Run(name="lookahead", given="lookahead", tree=Lookahead().default_shape),
        "SpS": Run(name="sps", given=lab.models.draft),
        "SpS, EAGLE-2's tree": Run(name="sps", given=lab.models.draft, tree=DYNAMIC),
    }
    trained = {label: lab.seeds(setting) for label, setting in TRAINED.items()}
    return {label: [run] for label, run in own.items()} | trained


def rates(lab: Lab) -> dict[str, Any]:
    """Every trained drafter with other learning rates: does one suit some better than others?"""
    tried = {
        (label, rate): [lab.run(replace(setting, rate=rate))]
        for label, setting in TRAINED.items()
        for rate in sorted((*RATES, LEARNING_RATE))
    }
    names = {key: f"{key[0]}, {key[1]:g}" for key in tried}
    done = lab.examine({names[key]: runs for key, runs in tried.items()}, lab.choosing)
    rows: dict[str, dict[str, list[float]]] = {}
    for (label, rate), name in names.items():
        found = interval(_marks(done[name]), of=attrgetter("decoded"))
        rows.setdefault(label, {})[f"{rate:g}"] = [round(value, 4) for value in found]
    return rows


def combination(lab: Lab) -> dict[str, Any]:
    """Networks with other objectives, on every kind of text; the best of them, or what another
    target chose, on prompts that it was not chosen by."""
    grid: dict[str, list[float]] = {}
    if lab.chosen is None:
        runs = {label: [lab.run(one)] for label, one in COMBINED.items()}
        for label, some in lab.examine(runs, lab.choosing).items():
            found = interval(_marks(some), of=attrgetter("decoded"))
            grid[label] = [round(value, 4) for value in found]
    best = lab.chosen or max(grid, key=lambda label: grid[label][0])
    label = f"ours: {best}"
    published = {network: lab.seeds(TRAINED[network]) for network in NETWORKS}
    done = lab.examine({**published, label: lab.seeds(COMBINED[best])}, lab.final)
    return {
        "grid": grid,
        "best": best,
        "row": as_row(lab, label, done[label]),
        "differences": [
            one
            for network in published
            for one in differences(label, done[label], network, done[network])
        ],
    }


def stages(lab: Lab) -> dict[str, Any]:
    """As many steps, but the forwards of a step grow from stage to stage. The published stages have
    budgets of their own, and no top-10 term in the first."""
    chains = {
        label: [lab.staged(TRAINED[label], some, seed) for seed in range(lab.amounts.seeds)]
        for label, some in STAGES.items()
    }
    every = [chain for some in chains.values() for chain in some]
    lab.collect([run for chain in every for run in chain])
    for number in range(max(map(len, every)) - 1):
        train([chain[number] for chain in every if number < len(chain) - 1], lab.work, lab.workers)
    grown = {f"{label}, in stages": [chain[-1] for chain in some] for label, some in chains.items()}
    published = {label: lab.seeds(TRAINED[label]) for label in ORDER}
    done = lab.examine(published | grown, lab.final)
    hass, griffin = grown
    pairs = [(griffin, "GRIFFIN"), (hass, "HASS"), (griffin, hass), (hass, "FSPAD")]
    return {
        "rows": [worth(label, done[label]) for label in (*grown, *published)],
        "differences": [
            one
            for better, worse in pairs
            for one in differences(better, done[better], worse, done[worse])
        ],
    }


def longer(lab: Lab) -> dict[str, Any]:
    """The paper's order after more training: what is taught to read its own outputs learns more
    from a token, and slower."""
    amounts = replace(lab.amounts, steps=LONGER * lab.amounts.steps, seeds=LONGER_SEEDS)
    long = replace(lab, amounts=amounts)
    done = long.examine({label: long.seeds(TRAINED[label]) for label in ORDER}, lab.final)
    return {
        "steps": amounts.steps,
        "seeds": amounts.seeds,
        "rows": [as_row(lab, label, some) for label, some in done.items()],
        "differences": [
            one
            for better, worse in pairwise(ORDER)
            for one in differences(better, done[better], worse, done[worse])
        ],
    }


def ablations(lab: Lab) -> dict[str, Any]:
    """What each choice of GRIFFIN and HASS brings; those of HASS, whose seeds hardly differ, have
    one."""
    bases = {"GRIFFIN": lab.seeds(GRIFFIN), "HASS": lab.seeds(HASS)}
    own = {label: lab.seeds(setting) for label, setting in ABLATIONS["GRIFFIN"].items()}
    own |= {label: [lab.run(setting)] for label, setting in ABLATIONS["HASS"].items()}
    done = lab.examine(bases | own, lab.final)
    rows = []
    for base, some in ABLATIONS.items():
        for label in (base, *some):
            against = (
                None
                if label == base
                else differences(label, done[label], base, done[base])[0]  # over all shapes
            )
            rows.append(as_row(lab, label, done[label]) | {"base": base, "against": against})
    return {"rows": rows}


def to_time(lab: Lab, record: Mapping[str, Any]) -> dict[str, Run]:
    """One seed of every method, and of the best of `combination` if that is known."""
    runs = {label: some[0] for label, some in method_runs(lab).items() if label != "plain"}
    if "combination" in record:
        found = record["combination"]
        runs[found["row"]["label"]] = lab.run(COMBINED[found["best"]])
    return runs


def differences(
    better: str, first: Sequence[Evaluated], worse: str, second: Sequence[Evaluated]
) -> list[dict[str, Any]]:
    """Over all shapes at both temperatures, and over each drafter's own tree at each."""
    over: dict[str, Pick] = {"all shapes, T = 0 and 1": attrgetter("decoded")}
    for temperature in TEMPERATURES:
        over[f"own trees, T = {temperature:g}"] = partial(_own, temperature)
    found = [
        difference(better, _marks(first), worse, _marks(second), of=of) for of in over.values()
    ]
    return [{"over": name} | one for name, one in zip(over, plain(found), strict=True)]


def _own(temperature: float, marks: Scores) -> list[Decoded]:
    """It comes behind the shapes that all share."""
    return [one for one in marks.decoded if one.temperature == temperature][-1:]


def _marks(some: Sequence[Evaluated]) -> list[Scores]:
    return [one.marks for one in some]


PARTS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "methods": methods,
    "rates": rates,
    "combination": combination,
    "stages": stages,
    "ablations": ablations,
    "longer": longer,
}
"""In the order of their weight: the later ones need the earlier ones' runs."""
