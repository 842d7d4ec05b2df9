"""What the length controller loses: `--draft-length auto` against every fixed length, by a measured
cost table and real acceptance.

    python benchmarks/planner/controller.py [--quick] [--prompts 24] [--tokens 96] [--workers 2]
    python benchmarks/planner/controller.py --trained runs/my-griffin   # a drafter that you have

models/mini-code continues code, prose and passages that it is to repeat, at several temperatures,
with every drafter: with drafts of 0, 1, ... 16 tokens, and with the controller. All is really
decoded. A run costs the sum over its steps of what the table gives for their widths: a clock would
add 30 % of noise. The table is measured first, interleaved; the controller goes by it too.
`useless` is a draft model with random weights. `mixed` is one controller on all texts of a
temperature in an order that is drawn; the sets have one each. No text is among those that the
controller's constants were chosen or tried on.

Writes benchmarks/results/controller.json and controller.md, and before, in two minutes that want an
idle machine, controller_costs.json. With --costs FILE that part is read instead; the rest looks at
no clock, and may run beside other work (40 minutes of two cores). With --only or --trained one
drafter is judged alone, and the files are called controller-NAME.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.bench.costs import Workload, clipped_arms, doubling
from draftsmith.config import from_dict
from draftsmith.core.generation import Arm
from draftsmith.core.sampling import Sampler
from draftsmith.errors import InputError
from draftsmith.plan.length_policy import LONGEST_AUTO, CostAware, Learning
from draftsmith.provenance import (
    digest,
    machine_summary,
    versions,
    write_json_atomic,
    write_text_atomic,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from controller_prices import (
    TEMPERATURES,
    Measured,
    Priced,
    arms,
    loop_share,
    measure,
    price,
    prompt_sets,
)

from models import mini_code

RESULTS = Path(__file__).resolve().parents[1] / "results"
QUICK = Path(__file__).resolve().parents[2] / "runs" / "controller-quick"
BAR = 0.03
MIXED = "mixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The controller against fixed lengths on one set."""

    drafter: str
    prompts: str
    best_length: int
    """0: no drafting."""
    fixed_speedup: float
    auto_speedup: float
    loss: float
    """The controller's loss against the best fixed length."""
    loss_low: float
    loss_high: float
    """95 %, prompts drawn anew."""
    mean_draft: float
    """Tokens per step that the controller drafted."""
    by_length: dict[int, float]
    """Speed-up of every fixed length."""


def judge(drafter: str, label: str, auto: Priced, fixed: Mapping[int, Priced]) -> Verdict:
    """By seconds per token: drawn texts differ from length to length."""
    ways = {0: undrafted(auto), **fixed}
    pace = {length: _pace(one) for length, one in ways.items()}
    best = min(pace, key=lambda length: pace[length])
    loss = _pace(auto) / pace[best] - 1.0
    rng = np.random.default_rng(0)
    count = len(auto.seconds_P)
    picks = rng.integers(count, size=(2000, count))
    drawn = _pace(auto, picks) / _pace(ways[best], picks) - 1.0
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Verdict(
        drafter=drafter,
        prompts=label,
        best_length=best,
        fixed_speedup=1.0 / float(pace[best]),
        auto_speedup=1.0 / float(_pace(auto)),
        loss=float(loss),
        loss_low=float(low),
        loss_high=float(high),
        mean_draft=auto.drafted,
        by_length={length: 1.0 / float(value) for length, value in pace.items()},
    )


def _pace(one: Priced, picks: np.ndarray | None = None) -> Any:
    if picks is None:
        return one.seconds_P.sum() / one.tokens_P.sum()
    return one.seconds_P[picks].sum(1) / one.tokens_P[picks].sum(1)


def undrafted(one: Priced) -> Priced:
    """As many tokens, each a plain step."""
    return Priced(seconds_P=one.tokens_P.astype(float), tokens_P=one.tokens_P, drafted=0.0)


def together(some: Sequence[Priced]) -> Priced:
    """Add up sets of prompts that are decoded one after the other."""
    return Priced(
        seconds_P=np.concatenate([one.seconds_P for one in some]),
        tokens_P=np.concatenate([one.tokens_P for one in some]),
        drafted=float(np.mean([one.drafted for one in some])),
    )


def compare(
    name: str,
    count: int,
    tokens: int,
    quick: bool,
    measured: Mapping[str, Measured],
    trained: Path | None,
) -> list[Verdict]:
    """One drafter on all sets, and on all of their texts mixed."""
    target = mini_code()
    assert target is not None
    arm = next(arm for arm in arms(target, trained) if arm.name == name)
    tried: Iterable[int] = doubling(arm.used_shape.depth) if quick else range(1, LONGEST_AUTO + 1)
    lengths = [length for length in tried if length <= arm.used_shape.depth]
    if name == "useless":  # what counts is what it costs over no drafting
        lengths = [1]
    verdicts: list[Verdict] = []

    def controlled(temperature: str) -> Arm:
        return replace(arm, policy=Learning(CostAware(costs=measured[temperature].by_length[name])))

    def found(label: str, auto: Priced, fixed: Mapping[int, Priced]) -> None:
        verdicts.append(judge(name, label, auto, fixed))
        print(table_of(verdicts[-1:]).splitlines()[-1], flush=True)

    sets = prompt_sets(target, count)
    fixed: dict[int, list[Priced]] = {length: [] for length in lengths}
    for prompts in sets:
        ways = [controlled(f"{prompts.cost_temperature:g}"), *clipped_arms(arm, lengths)]
        auto, *others = (price(target, way, prompts, measured, tokens) for way in ways)
        for length, one in zip(lengths, others, strict=True):
            fixed[length].append(one)
        found(prompts.label, auto, dict(zip(lengths, others, strict=True)))
    # texts stay in their places in the sum, so that all ways are drawn anew alike
    texts = [text for prompts in sets for text in prompts.alone()]
    by_temperature = {temperature: controlled(temperature) for temperature in measured}
    autos = {
        at: price(
            target, by_temperature[f"{texts[at].cost_temperature:g}"], texts[at], measured, tokens
        )
        for at in np.random.default_rng(0).permutation(len(texts)).tolist()
    }
    mixed = together([autos[at] for at in range(len(texts))])
    found(MIXED, mixed, {length: together(some) for length, some in fixed.items()})
    return verdicts


def holds(one: Verdict) -> bool:
    """A mixture is to be faster than every fixed length; where none pays, that is no drafting."""
    return one.loss <= (BAR if one.prompts != MIXED or not one.best_length else 0.0)


def table_of(verdicts: Sequence[Verdict]) -> str:
    """Markdown."""
    lines = [
        "| drafter | prompts | best fixed length | its speed-up | auto | loss |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in verdicts:
        loss = f"{100 * one.loss:+.1f} % ({100 * one.loss_low:+.1f} to {100 * one.loss_high:+.1f})"
        lines.append(
            f"| {one.drafter} | {one.prompts} | {one.best_length} | {one.fixed_speedup:.2f} | "
            f"{one.auto_speedup:.2f} | {loss} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--prompts", type=int, default=24, help="in each set")
    parser.add_argument("--tokens", type=int, default=96, help="for each prompt")
    parser.add_argument("--costs", type=Path, help="controller_costs.json of an earlier run")
    parser.add_argument("--rounds", type=int, default=40, help="of the cost table")
    parser.add_argument("--only", default="", help="one drafter")
    parser.add_argument("--trained", type=Path, help="folder of a drafter over hidden states")
    parser.add_argument("--workers", type=int, default=2, help="drafters side by side")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    count, tokens, rounds = given.prompts, given.tokens, given.rounds
    if given.quick:
        count, tokens, rounds = 2, 32, 3
    target = mini_code()
    if target is None:
        parser.error("models/mini-code is absent")
    sets = prompt_sets(target, count)
    try:
        everybody = arms(target, given.trained)
    except InputError as error:
        parser.error(str(error))
    names = [arm.name for arm in everybody]
    judged = names[-1:] if given.trained else [given.only] if given.only else names
    if not set(judged) <= set(names):
        parser.error(f"--only knows {', '.join(names)}")
    stem = f"controller-{judged[0]}" if len(judged) == 1 else "controller"
    out = QUICK if given.quick and given.out == RESULTS else given.out
    workload = Workload(
        prompts=[prompt for some in sets for prompt in some.prompts], max_new_tokens=tokens
    )
    began = time.monotonic()
    if given.costs is None:
        measured = {
            f"{temperature:g}": measure(
                target, everybody, Sampler(temperature=temperature), workload, rounds
            )
            for temperature in TEMPERATURES
        }
        write_json_atomic(out / f"{stem}_costs.json", measured)
    else:
        read = json.loads(given.costs.read_text(encoding="utf-8"))
        measured = {
            temperature: from_dict(Measured, one, where=temperature)
            for temperature, one in read.items()
        }
    for temperature, costs in measured.items():
        if not set(judged) <= set(costs.by_length):
            known = ", ".join(costs.by_length)
            parser.error(f"{given.costs} has costs of {known} alone at temperature {temperature}")
    asked = [(name, count, tokens, given.quick, measured, given.trained) for name in judged]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, context, torch.set_num_threads, (1,)) as pool:
        verdicts = [one for some in pool.map(compare, *zip(*asked, strict=True)) for one in some]
    content = {
        "quick": given.quick,
        "prompts": count,
        "tokens": tokens,
        "bar": BAR,
        "holds": all(map(holds, verdicts)),
        "texts": digest([[one.prompts, one.temperature, one.first_id] for one in sets]),
        "loop_share": {one.label: round(loop_share(target, one, tokens), 4) for one in sets},
        "seconds": round(time.monotonic() - began, 1),
        "step_seconds": {temperature: one.by_length for temperature, one in measured.items()},
        "verdicts": [asdict(one) for one in verdicts],
        "machine": machine_summary(),
        "versions": versions(),
    }
    write_json_atomic(out / f"{stem}.json", content)
    write_text_atomic(out / f"{stem}.md", table_of(verdicts))


if __name__ == "__main__":
    main()
