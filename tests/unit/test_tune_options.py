"""What `draftsmith tune` refuses, in whose words."""

from __future__ import annotations

import pytest

from draftsmith.cli import parse
from draftsmith.errors import InputError

BASE = ["--target", "T", "--suite", "s.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafter", "none"], "--drafter none is what all others are compared with"),
        (["--drafter", "prompt_lookup,none"], "--drafter none is what all others"),
        (["--drafter", "lookahead,lookahead"], "--drafter names one twice"),
        (["--drafter", "lookahead,"], "--drafter: expected values separated by commas"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1, got 0"),
        (["--batch-sizes", "1,-4"], "--batch-sizes must be at least 1, got -4"),
        (["--batch-sizes", "1,99999999999"], "--batch-sizes must be at most 4096, got 99999999999"),
        (["--batch-sizes", "1,two"], "--batch-sizes: expected ints separated by commas"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--longest", "0"], "--longest must be at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--temperature", "-1"], "--temperature must be 0"),
        (["--draft-length", "4"], "--draft-length is what tune finds out"),
        (["--draft-length", "auto"], "--draft-length is what tune finds out"),
        (["--draft-tree", "2,1"], "--draft-tree is what tune finds out"),
        (["--drafter-option", "k"], "KEY=VALUE"),
        (
            ["--drafter", "prompt_lookup,lookahead", "--drafter-option", "window=3"],
            "say which drafter",
        ),
    ],
)
def test_tune_refuses_in_one_sentence(words: list[str], message: str) -> None:
    if "--drafter" not in words:
        words = ["--drafter", "prompt_lookup", *words]
    with pytest.raises(InputError, match=message) as caught:
        parse("tune", [*BASE, *words]).validate()
    assert "\n" not in str(caught.value)


def test_batch_sizes_are_sorted_and_named_once() -> None:
    given = parse("tune", [*BASE, "--drafter", "prompt_lookup", "--batch-sizes", "8,1, 2,1"])
    given.validate()
    assert given.sizes() == (1, 2, 8)
