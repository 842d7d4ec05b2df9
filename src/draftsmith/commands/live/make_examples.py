"""`draftsmith live make-examples`: training examples from sentence pairs and prefixes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Leading, at_least, require
from draftsmith.data.prompts import MINI, check_prompt, filled
from draftsmith.data.text import read_text
from draftsmith.errors import InputError
from draftsmith.provenance import write_text_atomic


@dataclass(frozen=True, kw_only=True)
class LiveMakeExamplesOptions(VerbOptions):
    """Turn sentence pairs into examples that teach a model to translate beginnings, too."""

    pairs: Annotated[Path, Leading]
    """Lines of source TAB translation (columns before them are skipped), also .gz and .xz."""
    language: str = "German"
    """The language of the translations, as the prompt names it."""
    template: str = MINI
    """The prompt: a text with {source} and {language}."""
    prefixes: float = 0.5
    """Share of the examples that are beginnings of pairs, cut in proportion."""
    source_unit: Literal["word", "char"] = "word"
    """char: for languages without blanks."""
    target_unit: Literal["word", "char"] = "word"
    """The same of the translations."""
    form: Literal["pretrain", "prompts"] = "pretrain"
    """pretrain: prompt and completion; prompts: id, prompt and reference, for `collect --gold`."""
    limit: int | None = None
    """Use only the first pairs."""
    seed: int = 0
    """Keys the cuts."""
    out: Path = Path("runs/examples.jsonl")
    """A JSON object per line."""

    def validate(self) -> None:
        super().validate()
        require(0 <= self.prefixes < 1, f"--prefixes must lie in [0, 1): {self.prefixes}")
        at_least(1, "--limit", self.limit)
        at_least(0, "--seed", self.seed)
        check_prompt(self.template, "--template")


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
    from draftsmith.live.streams import prefix_pairs

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
