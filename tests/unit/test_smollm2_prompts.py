"""Prompts to train drafters of the real model on share no run of words with evaluations."""

from __future__ import annotations

import ast

from smollm2 import prompts


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
