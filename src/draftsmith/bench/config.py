"""Configurations of measuring and of tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.config import Configuration, at_least, each_at_least, parse_list, require
from draftsmith.core.config import (
    MOST_NODES,
    SamplingConfig,
    check_temperature,
    parse_temperatures,
)
from draftsmith.drafters.config import DraftingConfig
from draftsmith.targets.config import ModelConfig

_MOST_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Configuration):
    """A measurement: what is compared, on which prompts, how often."""

    model: ModelConfig
    drafter: str = "none,prompt_lookup"
    """Drafters to compare, separated by commas (see `draftsmith generate --help`)."""
    suite: str
    """A prompt file (JSONL or one per line, also .gz and .xz) or an installed suite."""
    limit: int | None = None
    """Use only the first prompts of the suite."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    temperature: str = "0,1"
    """Temperatures to measure at, separated by commas."""
    batch_size: int = 1
    """Prompts that are decoded together."""
    repeats: int = 3
    """How many times every prompt is measured with every drafter."""
    warmup: int = 1
    """Unmeasured rounds before the first measured one."""
    hf_baseline: bool = True
    """Transformers' own `generate` is measured beside our plain decoding; this switches it off."""
    perplexity: tuple[str, ...] = ()
    """Files, folders or patterns, as for `pretrain --text`: measure perplexity there and the
    acceptance of draft models, for `draftsmith plan`, in place of speed."""
    out: Path = Path("runs/bench")
    """Folder for report.html, summary.json, records.jsonl and run.json."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)

    def drafters(self) -> tuple[str, ...]:
        return parse_list(self.drafter, str, name="--drafter")

    def temperatures(self) -> tuple[float, ...]:
        return parse_temperatures(self.temperature)

    def validate(self) -> None:
        super().validate()
        self.temperatures()
        drafters = self.drafters()
        twice = len(set(drafters)) < len(drafters)
        require(not twice, f"--drafter names one twice: {self.drafter}")
        self.drafting.check_assignments(drafters)
        require(bool(self.suite.strip()), "--suite must name a prompt file or an installed suite")
        each_at_least(1, self, "limit", "max_new_tokens", "batch_size", "repeats")
        each_at_least(0, self, "warmup")
        if not self.perplexity:
            self.drafting.refuse_range()
            return
        self.drafting.check_lengths()
        timed = (self.repeats, self.warmup, self.hf_baseline) != (3, 1, True)
        flags = "--repeats, --warmup and --no-hf-baseline"
        require(not timed, f"{flags} are for measuring speed: leave them out with --perplexity")


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Configuration):
    """A search: which drafters, on which prompts, up to which length."""

    model: ModelConfig
    drafter: str
    """Drafters to choose among, separated by commas (see `draftsmith generate --help`)."""
    suite: str
    """Prompts like yours: a file (JSONL or one per line, also .gz and .xz)."""
    limit: int | None = 16
    """Use only the first prompts of the suite."""
    max_new_tokens: int = 64
    """Tokens to generate for each prompt; steps behind the first are measured."""
    temperature: float = 0.0
    """0 takes the most probable token; 1 draws from the model's own law."""
    batch_sizes: str = "1"
    """Numbers of rows to predict the speed-up for, separated by commas, such as 1,2,4,8."""
    longest: int = 16
    """Drafted tokens in the longest chains that are tried."""
    out: Path = Path("runs/tune")
    """Folder for tune.json, run.json and figures."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)

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
        for drafter in drafters:
            own = self.drafting.own_length(drafter, alone=len(drafters) == 1)
            require(own is None, f"--drafter-option {own} is what tune finds out: leave it out")
        self.drafting.check_assignments(drafters)
        require(bool(self.suite.strip()), "--suite must name a prompt file")
        each_at_least(1, self, "limit")
        each_at_least(2, self, "max_new_tokens")
        each_at_least(1, self, "longest", most=MOST_NODES)
        for size in self.sizes():
            at_least(1, "--batch-sizes", size, most=_MOST_ROWS)
