"""`draftsmith live make-examples`: training examples from sentence pairs and prefixes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.commands._live_verbs import LiveMakeExamplesOptions
from draftsmith.data.prompts import filled
from draftsmith.data.text import read_text
from draftsmith.errors import InputError
from draftsmith.live.streams import prefix_pairs
from draftsmith.provenance import write_text_atomic


@dataclass(frozen=True, kw_only=True)
class ExamplesResult:
    """The JSON object: what was written."""

    out: str
    pairs: int
    examples: int

    def json_payload(self) -> dict[str, Any]:
        return asdict(self)


def run(options: LiveMakeExamplesOptions) -> ExamplesResult:
    """Write the examples."""
    pairs = read(options.pairs, options.limit)
    made = prefix_pairs(
        pairs,
        options.prefixes,
        options.seed,
        source_unit=options.source_unit,
        target_unit=options.target_unit,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(options.out, "".join(_lines(made, options)))
    result = ExamplesResult(out=str(options.out), pairs=len(pairs), examples=len(made))
    Console(highlight=False, markup=False, soft_wrap=True).print(
        f"wrote {result.out}: {result.examples} examples of {result.pairs} pairs"
    )
    return result


def read(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """Read the last two columns of every line.

    Raises:
        InputError: the file or a line (by number) cannot be read.
    """
    found = []
    for number, line in enumerate(read_text(path).rstrip("\n").split("\n")[:limit], 1):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) < 2 or not all(columns[-2:]):
            raise InputError(f"{path}, line {number}: expected source and translation, by a tab")
        found.append((columns[-2], columns[-1]))
    return found


def _lines(pairs: list[tuple[str, str]], options: LiveMakeExamplesOptions) -> Iterator[str]:
    for number, (source, target) in enumerate(pairs):
        prompt = filled(options.template, language=options.language, source=source)
        example = {"prompt": prompt, "completion": target}
        if options.form == "prompts":
            example = {"id": f"{number:07}", "prompt": prompt, "reference": target}
        yield json.dumps(example, ensure_ascii=False) + "\n"
