"""`draftsmith quickstart`: a real model answers faster; then the main job, from collecting to a
better draft model, on the small models that ship with the project.

    real       one chat with a real model; plain decoding and drafters for it, measured
    show       one text, as it is decoded
    compare    ways to continue real code: plainly, by prompt lookup, by lookahead, by a draft model
    collect    texts of the target behind code that the models were trained on
    distil     the draft model learns from it
    gain       the draft model before and after, on code that no model was trained on

OUT/report.html, summary.json, figures/, records.jsonl   as `bench` writes them; run.json is last
OUT/smollm2/report.html, ...                             as `bench` writes them, of the real model
OUT/distilled/store, draft                               as `collect` and `distill` write them
OUT/distilled/prompts.jsonl, records.jsonl               what was asked; before and after, measured
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.commands._options import VerbOptions, holds_out
from draftsmith.config import each_at_least
from draftsmith.core.config import check_seed, parse_temperatures


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(VerbOptions):
    """Chat with a real model and measure it; decode, distil and measure small ones."""

    out: Path = Path("runs/quickstart")
    """Folder for report.html, summary.json, records.jsonl, run.json and what is distilled."""
    temperature: str = "0,0.8"
    """Temperatures to learn for and to measure at, separated by commas."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    limit: int | None = None
    """How many of the held-out prompts to use; left out: all."""
    models: Path | None = None
    """Folder with `target` and `draft`; left out: models/mini-code of the repository."""
    seed: int = 0
    """Seed of all draws."""

    def temperatures(self) -> tuple[float, ...]:
        return parse_temperatures(self.temperature)

    def validate(self) -> None:
        super().validate()
        self.temperatures()
        each_at_least(1, self, "max_new_tokens", "limit")
        check_seed(self.seed, "--seed")


@holds_out
def run(options: QuickstartOptions) -> dict[str, Any]:
    """Show, compare, collect, distil, measure the gain; everything goes to `options.out`."""
    from draftsmith.commands import quickstart_demo

    return quickstart_demo.run(options)
