"""How much to measure in the seconds there are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from draftsmith.bench.runner import Bench

FEWEST_PROMPTS = 3
FEWEST_TOKENS = 24
FEWEST_REPEATED = 4
"""Fewer prompts than this are not worth repeating."""
MOST_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """How much to measure."""

    prompts: int
    repeats: int
    tokens: int
    """New ones for each prompt."""


def choose_amount(seconds: float, *, each: float, prompts: int, tokens: int) -> Amount:
    """Three repeats of as many prompts as fit into `seconds`, so that a median can drop a stall of
    the machine; else one repeat of as many as fit; on the slowest machines shorter texts too.

    `each`: seconds of one prompt with everybody.
    """
    rounds = int(seconds / max(each, 1e-9))
    if rounds >= MOST_REPEATS * min(prompts, FEWEST_REPEATED):
        fitting = min(prompts, rounds // MOST_REPEATS)
        return Amount(prompts=fitting, repeats=MOST_REPEATS, tokens=tokens)
    fewest = min(prompts, FEWEST_PROMPTS)
    if rounds >= fewest:
        return Amount(prompts=min(prompts, rounds), repeats=1, tokens=tokens)
    share = seconds / (each * fewest)
    return Amount(
        prompts=fewest, repeats=1, tokens=min(tokens, max(FEWEST_TOKENS, int(share * tokens)))
    )


def settle_amount(bench: Bench, seconds: float, console: Console) -> None:
    """Have the measurement take about so many seconds: after its warm-up it is known how long a
    prompt takes, so the plan is cut to what fits, and printed."""

    def settle(each: float) -> None:
        plan = bench.plan
        amount = choose_amount(
            seconds, each=each, prompts=len(plan.items), tokens=plan.max_new_tokens
        )
        bench.plan = replace(
            plan,
            items=plan.items[: amount.prompts],
            repeats=amount.repeats,
            max_new_tokens=amount.tokens,
        )
        share = amount.tokens / plan.max_new_tokens
        temperatures = " and ".join(f"{sampler.temperature:g}" for sampler in plan.samplers)
        often = {1: "once", 2: "twice"}.get(amount.repeats, f"{amount.repeats} times")
        console.print(
            f"Measuring {len(plan.arm_names(plan.samplers[0]))} ways to continue {amount.prompts} "
            f"prompts by {amount.tokens} tokens at temperature {temperatures}, {often}, "
            f"interleaved: about {each * amount.prompts * amount.repeats * share:.0f} s.",
            soft_wrap=True,
        )

    bench.on_prepared = settle
