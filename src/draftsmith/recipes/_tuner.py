"""`draftsmith tune` at work: costs measured, every shape decoded, promises computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from draftsmith.bench.cost_cache import cost_file
from draftsmith.bench.costs import CostMeter, CostTable
from draftsmith.bench.step_costs import ROUNDS, Workload, open_meter, step_costs
from draftsmith.bench.suites import load_suite
from draftsmith.decode import DecodeOptions
from draftsmith.errors import InputError
from draftsmith.plan.control import StepCosts
from draftsmith.plan.tune import BatchPromise, Prices, Trial, Tuning, judge, speedup
from draftsmith.recipes._busy import warn_if_busy
from draftsmith.recipes._drafting import (
    check_predictions,
    encode,
    make_sampler,
    open_target,
    prediction,
)
from draftsmith.recipes._tune import (
    Entrant,
    Entry,
    between,
    decode_entry,
    open_entrants,
    prices,
    redrawn,
)
from draftsmith.sampler import Sampler
from draftsmith.targets.hf import HFTarget
from draftsmith.tune_options import TuneOptions


class Tuner:
    """Loads what is to be compared, and compares it."""

    def __init__(self, options: TuneOptions) -> None:
        self._options = options
        self._notes = Console(stderr=True, highlight=False, markup=False, style="dim")
        prompts = load_suite(options.suite, limit=options.limit)
        self.target: HFTarget = open_target(options.model)
        self._sampler: Sampler = make_sampler(options.temperature, options.sampling)
        self._entrants = open_entrants(
            options.drafters(),
            options.drafting,
            self.target,
            options.longest,
        )
        check_predictions(prompts, [entrant.chain for entrant in self._entrants])
        self._prompts = [encode(prompt, self.target) for prompt in prompts]
        self._predictions = [prediction(prompt, self.target) for prompt in prompts]
        self._decoding = DecodeOptions(
            sampler=self._sampler,
            max_new_tokens=options.max_new_tokens,
            rule=options.drafting.used_rule,
            allow_lossy=options.drafting.lossy,
            seed=options.sampling.seed,
        )

    def tune(self) -> Tuning:
        """Measure costs, decode with every shape, predict."""
        warn_if_busy()
        meter, costs = self._measure(1)
        table, draws = meter.table(), redrawn(meter, self._options.sampling.seed)
        trials = [
            trial
            for entrant in self._entrants
            for trial in self._try_all(entrant, costs[entrant.name], table)
        ]
        candidates = [
            judge(trial, self._price(table, trial), [self._price(one, trial) for one in draws])
            for trial in trials
        ]
        return Tuning(
            candidates=tuple(sorted(candidates, key=lambda one: one.speedup, reverse=True)),
            costs=costs,
            batches=self._batches(trials, table),
            plain_tokens_per_second=1 / table.target_seconds(1),
        )

    def _price(self, table: CostTable, trial: Trial) -> Prices:
        return prices(table, trial, self._sampler.temperature)

    def _say(self, text: str) -> None:
        self._notes.print(text, soft_wrap=True)

    def _measure(self, rows: int) -> tuple[CostMeter, dict[str, StepCosts]]:
        """Costs with so many rows, and those of chains by length, which --draft-length auto will
        find in the cache."""
        self._say(f"measuring what steps cost with {rows} row{'s' if rows > 1 else ''}")
        workload = Workload(
            prompts=self._prompts,
            max_new_tokens=self._options.max_new_tokens,
            predictions=self._predictions,
            rows=rows,
        )
        chains = [arm for entrant in self._entrants for arm in entrant.timed]
        trees = [entry.arm for entrant in self._entrants for entry in entrant.trees]
        meter = open_meter(self.target, [*chains, *trees], self._sampler, workload)
        meter.measure(ROUNDS)
        table, steps, costs, first = meter.table(), meter.steps(), {}, 0
        for entrant in self._entrants:
            own = steps[first : first + len(entrant.timed)]
            first += len(entrant.timed)
            drafter = entrant.chain.drafter
            costs[entrant.name] = step_costs(table, drafter, (0, *entrant.lengths), own)
            file = cost_file(self.target, entrant.chain, self._sampler, workload)
            trouble = file.store(costs[entrant.name])
            if trouble is not None:
                self._say(trouble)
        return meter, costs

    def _try_all(self, entrant: Entrant, costs: StepCosts, table: CostTable) -> list[Trial]:
        """Chains, first of doubling lengths and then around the best of them; trees; auto.

        Raises:
            InputError: no prompt gave a step to judge.
        """
        chains = self._judged(entrant.entries(entrant.lengths))
        if not chains:
            raise InputError(
                f"--suite {self._options.suite}: no prompt gave a step to judge, since each text "
                "ended in the step of its prompt; give prompts with longer texts, or a larger "
                "--max-new-tokens."
            )
        best = max(chains, key=lambda trial: speedup(trial, self._price(table, trial)))
        assert best.length is not None
        nearby = entrant.entries(between(best.length, entrant.lengths))
        others = (*nearby, *entrant.trees, entrant.controlled(costs))
        return [*chains, *self._judged(others)]

    def _judged(self, entries: Iterable[Entry]) -> list[Trial]:
        """Decoded; without those that got through every text in the step of its prompt."""
        return [trial for entry in entries if (trial := self._try(entry)).prompts]

    def _try(self, entry: Entry) -> Trial:
        self._say(f"decoding with {entry.drafter}, {entry.shape}")
        return decode_entry(self.target, entry, self._prompts, self._predictions, self._decoding)

    def _batches(self, trials: Sequence[Trial], table: CostTable) -> tuple[BatchPromise, ...]:
        """The best draft of each drafter at each batch size."""
        found = []
        for rows in self._options.sizes():
            priced, own = table, list(trials)
            if rows > 1:
                meter, costs = self._measure(rows)
                priced = meter.table()
                # a controller goes by what steps of such a batch cost
                auto = [entrant.controlled(costs[entrant.name]) for entrant in self._entrants]
                own = [trial for trial in trials if trial.depth is not None] + self._judged(auto)
            for entrant in self._entrants:
                promises = [
                    BatchPromise(
                        rows=rows,
                        trial=trial,
                        speedup=speedup(trial, self._price(priced, trial), rows=rows),
                    )
                    for trial in own
                    if trial.drafter == entrant.name
                ]
                found.append(max(promises, key=lambda one: one.speedup))
        return tuple(found)
