"""The options of `draftsmith tune`; see `options`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.commands._options import VerbOptions
from draftsmith.config import at_least, parse_list, require
from draftsmith.core.config import SamplingOptions, check_temperature
from draftsmith.drafters.config import DraftingOptions
from draftsmith.targets.config import ModelOptions


@dataclass(frozen=True, kw_only=True)
class TuneOptions(VerbOptions):
    """Find the best drafter, length or tree for this machine, or that none pays."""

    model: ModelOptions
    drafter: str
    """Drafters to choose among, separated by commas (see `draftsmith generate --help`)."""
    suite: str
    """Prompts like yours: a file (JSONL or one per line, also .gz and .xz)."""
    limit: int | None = 16
    """Use only the first prompts of the suite."""
    max_new_tokens: int = 64
    """Tokens to generate for each prompt; steps behind the first are judged."""
    temperature: float = 0.0
    """0 takes the most probable token; 1 draws from the model's own law."""
    batch_sizes: str = "1"
    """Numbers of rows to predict the speed-up for, separated by commas, such as 1,2,4,8."""
    longest: int = 16
    """Drafted tokens in the longest chains that are tried."""
    out: Path = Path("runs/tune")
    """Folder for tune.json, run.json and figures."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)

    def drafters(self) -> tuple[str, ...]:
        return parse_list(self.drafter, str, name="--drafter")

    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(set(parse_list(self.batch_sizes, int, name="--batch-sizes"))))

    def validate(self) -> None:
        super().validate()
        check_temperature(self.temperature)
        drafters = self.drafters()
        require(
            "none" not in drafters,
            "--drafter none is what all others are compared with: leave it out",
        )
        require(len(set(drafters)) == len(drafters), f"--drafter names one twice: {self.drafter}")
        for name in ("draft_length", "draft_tree"):
            flag = f"--{name.replace('_', '-')}"
            free = getattr(self.drafting, name) is None
            require(free, f"{flag} is what tune finds out: leave it out")
        self.drafting.check_assignments(drafters)
        require(bool(self.suite.strip()), "--suite must name a prompt file")
        at_least(1, "--limit", self.limit)
        at_least(2, "--max-new-tokens", self.max_new_tokens)
        at_least(1, "--longest", self.longest)
        at_least(1, "--batch-sizes", min(self.sizes()))
