"""Which number of threads is the fastest for a target's forwards, measured in turns.

    round 1    1 thread: widths 1, 4, 16     2 threads: widths 1, 4, 16    ...
    round 2    2 threads: ...                                              (begins one further)

A number's cost is the mean over widths of its seconds over the least seconds at that width, medians
over rounds. Of numbers within the noise of the best the smallest is taken: other programs get the
rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from draftsmith.bench.costs import ForwardProbe, doubling
from draftsmith.provenance import load_of_others, usable_cpus
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.threads import ThreadFile, is_chosen

WIDTHS = (1, 4, 16)
"""Plain decoding, and what drafts are verified in."""
THREAD_ROUNDS = 7
NOISE = 0.03
"""Numbers this near to the best count as equal."""
_EACH = 8
"""Up to so many processors every number is tried; with more, doubling ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadCosts:
    """What was measured, and the number to use."""

    best: int
    seconds: Mapping[int, Mapping[int, float]]
    """Number of threads -> width -> median seconds of a forward."""
    kept: str | None
    """Where later runs find it; None: it is not kept."""
    why_not: str = ""
    """Why it is not kept."""

    def sentence(self) -> str:
        """What is the best, and how later runs get it."""
        first = min(self.seconds[self.best])
        each = ", ".join(
            f"{count}: {1e3 * found[first]:.1f} ms" for count, found in self.seconds.items()
        )
        later = (
            f"kept for this model in {self.kept}"
            if self.kept is not None
            else f"not kept, because {self.why_not}: OMP_NUM_THREADS={self.best} asks for it"
        )
        threads = "thread is" if self.best == 1 else "threads are"
        return f"{self.best} {threads} the fastest (a token with {each}); {later}"


def candidates(most: int) -> tuple[int, ...]:
    """The numbers to try on so many processors."""
    if most <= _EACH:
        return tuple(range(1, most + 1))
    return doubling(most)


def choose(seconds: Mapping[int, Mapping[int, float]]) -> int:
    """The number to use, of `ThreadCosts.seconds`."""
    widths = list(next(iter(seconds.values())))
    least = {width: min(found[width] for found in seconds.values()) for width in widths}
    cost = {
        count: statistics.fmean(found[width] / least[width] for width in widths)
        for count, found in seconds.items()
    }
    return min(count for count in cost if cost[count] <= (1 + NOISE) * min(cost.values()))


def time_threads(
    counts: Sequence[int],
    time_forward: Callable[[int], float],
    use: Callable[[int], None],
    *,
    widths: Sequence[int] = WIDTHS,
    rounds: int = THREAD_ROUNDS,
) -> dict[int, dict[int, float]]:
    """Median seconds by number of threads and width.

    Args:
        time_forward: seconds of one forward of this width.
        use: sets the number of threads.
    """
    found: dict[int, dict[int, list[float]]] = {
        count: {width: [] for width in widths} for count in counts
    }
    for number in range(rounds):
        shift = number % len(counts)
        for count in (*counts[shift:], *counts[:shift]):
            use(count)
            time_forward(widths[0])  # threads are made at their first use
            for width in widths:
                found[count][width].append(time_forward(width))
    return {
        count: {width: statistics.median(times) for width, times in by_width.items()}
        for count, by_width in found.items()
    }


def tune_threads(target: HFTarget, prompt: Sequence[int]) -> ThreadCosts | None:
    """Measure behind this prompt, use the best number from now on, and keep it for later runs
    unless other programs are at work.

    None: there is nothing to choose. The target is not on a CPU, there is one processor, the
    caller's environment has chosen, or the context has no room behind the prompt.
    """
    most, widest = usable_cpus(), max(WIDTHS)
    room = (target.max_length or 1 << 40) - widest
    if target.device.type != "cpu" or most == 1 or is_chosen() or room < 1:
        return None
    others = load_of_others()
    probe = ForwardProbe(target, prompt[:room], widest)
    with torch.inference_mode():
        seconds = time_threads(candidates(most), probe.seconds, torch.set_num_threads)
    best = choose(seconds)
    torch.set_num_threads(best)
    if others is not None:  # fewer threads are best beside them, and too few when they are gone
        return ThreadCosts(best=best, seconds=seconds, kept=None, why_not=others)
    file = ThreadFile.of(target.name, target.model, target.engine)
    if not file.store(best):
        reason = f"{file.place} cannot be written"
        return ThreadCosts(best=best, seconds=seconds, kept=None, why_not=reason)
    return ThreadCosts(best=best, seconds=seconds, kept=file.place)
