"""Prompts to train drafters of the real model on share no run of words with evaluations."""

from __future__ import annotations

import ast
import gzip
import json
import lzma
from pathlib import Path

import pytest

from smollm2 import prompts

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def test_eight_words_in_a_row_are_an_overlap() -> None:
    judged = prompts.runs("Janet's ducks lay 16 eggs per day, and she eats three.")
    assert not judged.isdisjoint(prompts.runs("Say: ducks lay 16 eggs per day AND she! Why?"))
    assert judged.isdisjoint(prompts.runs("Say: lay 16 eggs per day and she, why is that so?"))


def test_a_short_text_is_an_overlap_as_a_whole() -> None:
    assert prompts.runs("Hello, World") == prompts.runs("hello world")
    assert prompts.runs("") == set()


def test_functions_are_whole_beginnings_without_their_bodies() -> None:
    found = list(prompts.functions())
    assert len(found) > 500
    for one in found:
        code = one.removeprefix("Complete the following Python function.\n\n```python\n")
        code = code.removesuffix("\n```")
        tree = ast.parse(f"if True:\n{code}" if code.startswith((" ", "\t")) else code)
        (node,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        assert ast.get_docstring(node) and len(node.body) == 1, "nothing behind the docstring"


def judged() -> set[tuple[str, ...]]:
    """Eight words in a row of every question of the evaluations, read from their files here."""
    folder, found = DATA / "prompts", set[tuple[str, ...]]()
    texts: list[str] = []
    for line in (folder / "mt_bench/question.jsonl").read_text(encoding="utf-8").splitlines():
        texts += json.loads(line)["turns"]
    with lzma.open(folder / "spec_bench/question.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts += [turn for line in lines for turn in json.loads(line)["turns"]]
    with lzma.open(folder / "gsm8k/test.jsonl.xz", "rt", encoding="utf-8") as lines:
        texts += [json.loads(line)["question"] for line in lines]
    with gzip.open(folder / "humaneval/HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts += [json.loads(line)["prompt"] for line in lines]
    for text in texts:
        found |= prompts.runs(text)
    assert len(found) > 100_000
    return found


@pytest.mark.skipif(not (DATA / "prompts").is_dir(), reason="the prompt sets are not here")
def test_no_prompt_of_training_shares_eight_words_with_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluations = list(prompts.evaluation_texts(DATA))
    code = [text for text in evaluations if text.startswith("\ndef ") or "\n    return " in text]
    planted = [
        f"Answer this. {evaluations[0]} Thank you.",  # of MT-bench
        f"Complete this code:\n\n{max(code, key=len)}",  # of HumanEval
    ]
    texts = {
        "questions": [*prompts.questions(DATA), planted[0]],
        "functions": [planted[1], *prompts.functions()],
    }

    def overlapping() -> tuple[set[str], int]:
        rows, left_out = prompts.without_overlap(texts, DATA)
        asked = {row["question"] for row in rows}
        assert len(asked) > 6000 and {row["tag"] for row in rows} == set(texts)
        every = {text for some in texts.values() for text in some if text}
        assert len(every) - len(asked) == left_out
        runs = judged() | {run for text in evaluations for run in prompts.runs(text)}
        return {text for text in asked if not runs.isdisjoint(prompts.runs(text))}, left_out

    shared, left_out = overlapping()
    assert not shared and left_out >= len(planted)
    monkeypatch.setattr(prompts, "evaluation_texts", lambda data: iter(()))
    shared, left_out = overlapping()
    assert shared >= set(planted) and left_out == 0, "without the filter nothing would be seen"
