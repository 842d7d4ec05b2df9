"""`pretrain` from prompts with completions: only completions count, and none is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_pretrain import options as pretrain_options

from draftsmith.commands import pretrain
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.data import text
from draftsmith.data.text import TextConfig
from draftsmith.distill import tokenizer_training
from draftsmith.distill.config import ArchitectureConfig
from draftsmith.errors import InputError


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    names = "cat dog mat log sun sea".split()
    records = [
        {"prompt": f"twice {a} {b}: ", "completion": f"{a} {b} {a} {b}"}
        for a in names
        for b in names
    ]
    return write(tmp_path / "pairs.jsonl", records)


def options(pairs: Path, out: Path, *held: Path, **training: Any) -> PretrainOptions:
    data = TextConfig(text=(str(pairs),), eval_text=tuple(map(str, held)))
    return replace(pretrain_options(pairs, out, **training), data=data)


def test_only_completions_count_and_the_model_learns_them(pairs: Path, tmp_path: Path) -> None:
    held = write(tmp_path / "held.jsonl", [{"prompt": "twice cat sea: ", "completion": "cat sea"}])
    out = tmp_path / "out"
    pretrain.run(options(pairs, out, held, duration="120steps", batch_tokens=512))
    record = json.loads((out / "run.json").read_text())["results"]
    tokenizer = tokenizer_training.load_tokenizer(str(out))
    wanted = tokenizer("cat sea", add_special_tokens=False)["input_ids"]
    assert record["held_out_tokens"] == len(wanted) + 1  # its end token, and nothing of the prompt
    assert record["training_loss"][0][1] > 4
    assert record["training_loss"][-1][1] < 1


def test_examples_and_plain_text_do_not_mix(pairs: Path, tmp_path: Path) -> None:
    plain = tmp_path / "z.txt"
    plain.write_text("plain text")
    files = text.find_files([str(pairs), str(plain)])
    with pytest.raises(InputError, match=r"z\.txt.*plain"):
        list(text.examples(files))


def test_a_line_that_is_no_example_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    with pytest.raises(InputError, match=r"a\.jsonl, line 2\b"):
        list(text.examples(text.find_files([str(path)])))


def test_a_vocabulary_subset_needs_plain_text(pairs: Path, tmp_path: Path) -> None:
    whole = options(pairs, tmp_path / "out", duration="2steps")
    pretrain.run(whole)
    model = ArchitectureConfig(size="tiny", tokenizer=str(tmp_path / "out"), vocab_subset=300)
    with pytest.raises(InputError, match="--vocab-subset needs plain text"):
        pretrain.run(replace(whole, model=model, out=tmp_path / "subset"))
