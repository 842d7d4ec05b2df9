"""Where the constants of the length controller come from: its loss against the best fixed length,
on synthetic acceptance and on that of the shipped models, as they are and with each one changed.

    python benchmarks/planner/constants.py [--rows 24] [--no-texts]

No clock is read. What would be accepted at each place of a text is decided beforehand, so that all
lengths and controllers meet the same luck:

    place      0  1  2  3  4 ...         a draft of 3 at place 1: 2 accepted, the next place is 4
    accepted   5  2  1  0  7 ...

Writes benchmarks/results/controller_constants.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.core import rows
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.rows import Row, wanted
from draftsmith.core.sampling import Sampler
from draftsmith.data.suites import held_out_prompts
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import NgramIndex, PromptLookup
from draftsmith.plan import length_policy
from draftsmith.plan.length_policy import CostAware, Learning, StepCosts
from draftsmith.provenance import versions, write_json_atomic
from draftsmith.targets.hf import HFTarget, load_target

RESULTS = Path(__file__).resolve().parents[1] / "results"
MODELS = Path(__file__).resolve().parents[2] / "models" / "mini-code"
DEPTH = 16
SHORT, LONG = 128, 512
"""Tokens in a row."""
CHANGES: dict[str, tuple[float, ...]] = {
    "_PRIOR": (0.5, 0.7),
    "_RISE": (2.0, 5.0),
    "_FIRST": (1.0, 3.0),
    "_DEEPER": (1.5, 6.0),
    "_FOUND": (2.0, 20.0),
    "_OTHERS": (4.0, 30.0),
    "_COMMON": (15.0, 60.0),
    "_TRUST": (1.0, 4.0),
    "_HOPE": (0.0, 1.0, 2.0),
    "_FADE": (0.7, 0.97),
    "_DOUBT": (0.97, 1.0),
    "_SURPRISE": (2.0, 1e9),
    "_TRIAL": (0, 32),
    "_BEST": (0.8, 1.0),
    "_GROWTH": (1, DEPTH),
    "_ROOM": (2, DEPTH),
    "_KNOWN": (0.1, 0.9),
    "_REST": (1, 8),
    "_LONGER": (0.0, 1.0),
    "_LONGEST": (8, 64),
    "_ENDED": (1, 8),
    "_HELD": (1, 4),
    "_YOUNG": (0, 32),
    "_SHORT": (1, DEPTH),
    "_WHOLE": (1.0, 16.0),
    "_BRIEF": (5.0, 20.0),
    "_AGEING": (0.35, 1.0),
    "_LONG": (33.0, 128.0),
    "_BAD_LUCK": (0, 1 << 30),
}
"""Each constant, too small and too large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of one kind at one cost of steps."""

    name: str
    accepted_RT: np.ndarray
    """Accepted tokens of the longest possible draft at each position of each row."""
    offered_RT: np.ndarray
    """How much there is to draft there."""
    costs: StepCosts
    best: float
    """Seconds of the best fixed length, or where rates change, of the best for each part."""


def linear(target: float, draft: float, *, first: float = 0.0, window: float = 0.0) -> StepCosts:
    """In plain steps: per drafted token of target and drafter, for drafting at all, and for a step
    that finds nothing to draft."""
    lengths = np.arange(DEPTH + 1)
    return StepCosts(
        target_D=tuple((1.0 + target * lengths + first * (lengths > 0)).tolist()),
        draft_D=tuple((draft * lengths).tolist()),
        in_vain=1.0 + window,
    )


COSTS = {
    "lookup, GPU": linear(0.006, 0.0),
    "lookup, CPU": linear(0.045, 0.0),
    "model at 0.05, GPU": linear(0.01, 0.05),
    "model at 0.12, CPU": linear(0.045, 0.12),
    "model at 0.3": linear(0.01, 0.3),
    "lookup, float32 on a CPU": linear(0.12, 0.0, first=0.5),
    "a window beside the draft": linear(0.04, 0.0, first=0.6, window=0.6),
}
SELDOM_COSTS = ("lookup, GPU", "lookup, CPU", "a window beside the draft")
TEXT_COSTS = {
    "prompt_lookup": ("lookup, GPU", "lookup, CPU", "lookup, float32 on a CPU"),
    "independent": ("model at 0.05, GPU", "model at 0.12, CPU", "model at 0.3"),
}

# --------------------------------------------------------------------------- acceptance


def by_place(rate_RT: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Accepted lengths where the token at place t is accepted with probability rate_RT[:, t]."""
    count, length = rate_RT.shape
    padded = np.concatenate([rate_RT, np.repeat(rate_RT[:, -1:], DEPTH, 1)], 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, DEPTH, axis=1)[:, :length]
    return (rng.random((count, length, DEPTH)) < windows).cumprod(2).sum(2)


def by_depth(rate_D: np.ndarray, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    return (rng.random((*shape, DEPTH)) < rate_D).cumprod(2).sum(2)


def synthetic(count: int, length: int) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
    """(name, accepted_RT, places where the rate changes) of every process."""
    rng, shape = np.random.default_rng(0), (count, length)
    for rate in (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95):
        yield f"rate {rate:g}", by_place(np.full(shape, rate), rng), ()
    depth = np.arange(DEPTH)
    yield "falling with depth", by_depth(0.85 * 0.9**depth, shape, rng), ()
    yield "rising with depth", by_depth(np.minimum(0.35 + 0.12 * depth, 0.95), shape, rng), ()
    for mean, weight in ((0.3, 1.0), (0.6, 1.0), (0.6, 4.0)):
        rate_RT1 = rng.beta(mean * weight, (1 - mean) * weight, (*shape, 1))
        found = (rng.random((*shape, DEPTH)) < rate_RT1).cumprod(2).sum(2)
        yield f"a rate per step, mean {mean:g}, weight {weight:g}", found, ()
    for easy, hard, mean in ((0.9, 0.2, 40), (0.95, 0.0, 60), (0.9, 0.3, 15)):
        switches = rng.random(shape) < 1 / mean
        state = (switches.cumsum(1) + rng.integers(2, size=(count, 1))) % 2
        name = f"passages of {mean} at {easy:g} and {hard:g}"
        yield name, by_place(np.where(state, easy, hard), rng), ()
    for parts in ((0.9, 0.0), (0.0, 0.9), (0.95, 0.1, 0.95, 0.1), (0.5, 0.9)):
        cuts = tuple(length * n // len(parts) for n in range(1, len(parts)))
        rate_T = np.repeat(parts, -(-length // len(parts)))[:length]
        name = "changes " + ", ".join(f"{part:g}" for part in parts)
        yield name, by_place(np.tile(rate_T, (count, 1)), rng), cuts


def seldom(count: int, length: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, accepted_RT, offered_RT) where there is not always something to draft."""
    rng, shape = np.random.default_rng(1), (count, length)
    for share in (0.3, 0.6):
        for copies, rate in ((0.0, 0.05), (0.3, 0.3), (0.7, 0.5)):
            rate_RT1 = np.where(rng.random(shape) < copies, 0.95, rate)[:, :, None]
            found = (rng.random((*shape, DEPTH)) < rate_RT1).cumprod(2).sum(2)
            offered_RT = DEPTH * (rng.random(shape) < share)
            name = f"found in {share:g}, a copy in {copies:g}, else {rate:g}"
            yield name, np.minimum(found, offered_RT), offered_RT


def texts(count: int) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """(drafter, text, accepted_RT, offered_RT) of what mini-code says. A draft model's token is
    accepted with sum of min(p, q), a looked-up one where it is what the target said."""
    target, draft = load_target(str(MODELS / "target")), load_target(str(MODELS / "draft"))
    prompts = [prompt.token_ids(target.tokenizer) for prompt in held_out_prompts(count)]
    rng = np.random.default_rng(0)
    for temperature in (0.0, 0.8):
        options = DecodeOptions(
            sampler=Sampler(temperature=temperature), max_new_tokens=SHORT, ignore_end=True
        )
        made = generate(target, NoDrafter(), prompts, options, batch_size=8)
        said = [one.token_ids for one in made]
        name = f"code at temperature {temperature:g}"
        pairs = list(zip(prompts, said, strict=True))
        rate_RT = np.array([overlap(target, draft, *pair, temperature) for pair in pairs])
        whole = np.full(rate_RT.shape, DEPTH)
        yield "independent", name, by_place(rate_RT, rng), whole
        accepted, offered = zip(*(looked_up(*pair) for pair in pairs), strict=True)
        yield "prompt_lookup", name, np.array(accepted), np.array(offered)


def overlap(
    target: HFTarget,
    draft: HFTarget,
    prompt: tuple[int, ...],
    said: tuple[int, ...],
    temperature: float,
) -> np.ndarray:
    """[T] sum of min(p, q) at each place of a text; at temperature 0 whether both agree."""
    ids = torch.tensor([[*prompt, *said]])
    laws = []
    for model in (target, draft):
        with model.native() as native, torch.inference_mode():
            logits_TV = native(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        laws.append(logits_TV)
    p, q = (law[:, : min(law.shape[1] for law in laws)] for law in laws)
    if temperature == 0:
        return np.asarray((p.argmax(-1) == q.argmax(-1)).double())
    p, q = ((law / temperature).softmax(-1) for law in (p, q))
    return np.asarray(torch.minimum(p, q).sum(-1))


def looked_up(prompt: tuple[int, ...], said: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """(accepted, offered) at each place."""
    index = NgramIndex(PromptLookup.Config(), prompt)
    accepted, offered = [], []
    for place, token in enumerate(said):
        found = index.continuation(DEPTH)
        offered.append(len(found))
        same = (a == b for a, b in zip(found, said[place:], strict=False))
        accepted.append(next((n for n, good in enumerate(same) if not good), len(found)))
        index.extend([token])
    return accepted, offered


# --------------------------------------------------------------------------- decoding


def seconds(case: Case, policy: Learning | int) -> float:
    """Mean over rows, for all their tokens."""
    spent = 0.0
    for accepted, offered in zip(case.accepted_RT.tolist(), case.offered_RT.tolist(), strict=True):
        place, count = 0, len(accepted)
        row = Row(request_id=0, tokens=[0], num_prompt=1, max_new_tokens=count, max_length=None)
        while place < count:
            wants = policy if isinstance(policy, int) else wanted([row], policy)[0]
            row.asked = min(wants, count - place - 1)
            depth = min(row.asked, offered[place])
            kept = min(accepted[place], depth)
            vain = row.asked > 0 and offered[place] == 0
            spent += case.costs.in_vain if vain else case.costs.seconds(depth)
            row.count(depth, kept)
            place += kept + 1
        if not isinstance(policy, int):
            policy.learn([row.counts])
    return spent / len(case.accepted_RT)


def make_case(
    name: str,
    accepted_RT: np.ndarray,
    offered_RT: np.ndarray,
    cost: str,
    cuts: tuple[int, ...] = (),
) -> Case:
    best, bounds = 0.0, (0, *cuts, accepted_RT.shape[1])
    for start, stop in itertools.pairwise(bounds):
        part = Case(
            name=name,
            accepted_RT=accepted_RT[:, start:stop],
            offered_RT=offered_RT[:, start:stop],
            costs=COSTS[cost],
            best=0.0,
        )
        best += min(seconds(part, length) for length in range(DEPTH + 1))
    return Case(
        name=f"{name}; {cost}",
        accepted_RT=accepted_RT,
        offered_RT=offered_RT,
        costs=COSTS[cost],
        best=best,
    )


def cases(count: int, with_texts: bool) -> dict[str, list[Case]]:
    """All cases by group; against the best fixed length but for `changes`."""
    found: dict[str, list[Case]] = {}
    for length in (SHORT, LONG):
        for name, accepted_RT, cuts in synthetic(count, length):
            whole = np.full(accepted_RT.shape, DEPTH)
            group = "changes" if cuts else f"synthetic, {length} tokens"
            if cuts and length == SHORT:
                continue
            found.setdefault(group, []).extend(
                make_case(name, accepted_RT, whole, cost, cuts) for cost in COSTS
            )
        for name, accepted_RT, offered_RT in seldom(count, length):
            found[f"synthetic, {length} tokens"].extend(
                make_case(name, accepted_RT, offered_RT, cost) for cost in SELDOM_COSTS
            )
    if with_texts:
        for drafter, name, accepted_RT, offered_RT in texts(count):
            found.setdefault("texts", []).extend(
                make_case(f"{drafter}, {name}", accepted_RT, offered_RT, cost)
                for cost in TEXT_COSTS[drafter]
            )
    return found


@contextlib.contextmanager
def changed(name: str, value: float) -> Iterator[None]:
    """A constant of the controller, or of a row's memory, with another value."""
    module: Any = length_policy if name in vars(length_policy) else rows
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def losses(groups: dict[str, list[Case]]) -> dict[str, dict[str, float]]:
    """Per group and case."""
    return {
        group: {
            case.name: seconds(case, Learning(CostAware(costs=case.costs))) / case.best - 1.0
            for case in some
        }
        for group, some in groups.items()
    }


def say(label: str, found: dict[str, dict[str, float]]) -> None:
    parts = [
        f"{group} {100 * statistics.fmean(some.values()):.2f} (most {100 * max(some.values()):.1f})"
        for group, some in found.items()
    ]
    print(f"{label:<20} {'; '.join(parts)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=24, help="of each kind")
    parser.add_argument("--no-texts", action="store_true", help="synthetic acceptance alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_constants.json")
    given = parser.parse_args()
    groups = cases(given.rows, with_texts=not given.no_texts and MODELS.is_dir())
    print("loss in percent: mean (most)")
    as_is = losses(groups)
    say("as it is", as_is)
    content: dict[str, Any] = {"rows": given.rows, "versions": versions(), "as it is": as_is}
    for name, values in CHANGES.items():
        for value in values:
            with changed(name, value):
                found = losses(groups)
            label = f"{name.strip('_').lower()} {value:g}"
            say(label, found)
            content[label] = {
                group: {"mean": statistics.fmean(some.values()), "most": max(some.values())}
                for group, some in found.items()
            }
    write_json_atomic(given.out, content)


if __name__ == "__main__":
    main()
