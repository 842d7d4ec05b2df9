"""`draftsmith live make-examples`: training examples from sentence pairs and prefixes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Leading, each_at_least, require_another
from draftsmith.core.config import check_seed
from draftsmith.data.jsonl import write_objects
from draftsmith.data.prompts import MINI, check_prompt, filled
from draftsmith.data.text import sentences
from draftsmith.errors import InputError
from draftsmith.live.config import check_prefixes


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
        check_prefixes(self.prefixes)
        each_at_least(1, self, "limit")
        check_seed(self.seed, "--seed")
        check_prompt(self.template, "--template")
        require_another(self.out, pairs=self.pairs)


def run(options: LiveMakeExamplesOptions) -> dict[str, Any]:
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
    write_objects(options.out, _examples(made, options))
    note = f"wrote {options.out}: {len(made)} examples of {len(pairs)} pairs"
    Console(highlight=False, markup=False, soft_wrap=True).print(note)
    return {"out": str(options.out), "pairs": len(pairs), "examples": len(made)}


def read(path: Path, limit: int | None) -> list[tuple[str, str]]:
    """Read the last two columns of every line.

    Raises:
        InputError: the file or a line (by number) cannot be read.
    """
    found = []
    for number, line in enumerate(sentences(path, limit), 1):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) < 2 or not all(columns[-2:]):
            raise InputError(f"{path}, line {number}: expected source and translation, by a tab")
        found.append((columns[-2], columns[-1]))
    return found


def _examples(
    pairs: list[tuple[str, str]], options: LiveMakeExamplesOptions
) -> Iterator[dict[str, str]]:
    for number, (source, target) in enumerate(pairs):
        prompt = filled(options.template, language=options.language, source=source)
        example = {"prompt": prompt, "completion": target}
        if options.form == "prompts":
            example = {"id": f"{number:07}", "prompt": prompt, "reference": target}
        yield example
