"""The options of `draftsmith plan VERB`; see `options`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from draftsmith.commands._options import VerbOptions
from draftsmith.config import (
    Configuration,
    Leading,
    Many,
    at_least,
    parse_count,
    parse_list,
    require,
    unused,
)

TableName = Literal["1", "2", "3", "4", "5", "6", "7", "8", "9", "all"]


@dataclass(frozen=True, kw_only=True)
class LawsOptions(Configuration):
    """The laws that a plan goes by."""

    coefficients: str | None = None
    """A,B,C of acceptance = A draft perplexity + B target perplexity + C; left out: the paper's."""
    law: Path | None = None
    """Take them from what `plan law --json` printed, with their covariance."""
    loss: str | None = None
    """E,A,nu,B,delta of the loss law; left out: Besiroglu et al. `plan fit` finds your own."""

    def acceptance_numbers(self) -> tuple[float, ...] | None:
        """A, B, C; None: not given."""
        return _numbers(self.coefficients, "--coefficients", "A,B,C")

    def loss_numbers(self) -> tuple[float, ...] | None:
        """E, A, nu, B, delta; None: not given."""
        return _numbers(self.loss, "--loss", "E,A,nu,B,delta")

    def validate(self) -> None:
        both = self.coefficients is not None and self.law is not None
        require(not both, "--coefficients and --law exclude each other")
        self.acceptance_numbers()
        for value in self.loss_numbers() or ():
            require(value >= 0, f"--loss: the five constants are 0 or more, got {value:g}")


@dataclass(frozen=True, kw_only=True)
class PlanLawOptions(VerbOptions):
    """Fit the acceptance rate as a law of perplexities, pooled and per target."""

    observations: Annotated[tuple[Path, ...], Leading]
    """CSV with columns target, draft, target_ppl, draft_ppl, alpha (moe is drawn if it is there),
    or folders of `bench --perplexity`, which has one for each target; all are taken together."""
    protocol: str | None = None
    """Where a pair was measured in several ways: which one (decoded or retokenised)."""
    fixed_effects: bool = False
    """Fit a constant per target, too: what drafts do within a target."""
    predict: Many = ()
    """Draft and target perplexity, such as 18.4,11.7: predict this pair, with intervals."""
    out: Path | None = None
    """Write law.json and figures to this folder."""

    def pairs(self) -> tuple[tuple[float, float], ...]:
        """`predict` as numbers."""
        found = []
        for text in self.predict:
            draft, target = _numbers(text, "--predict", "DRAFT_PPL,TARGET_PPL") or (0.0, 0.0)
            good = min(draft, target) >= 1
            require(good, f"--predict: perplexities are 1 or more, got {text!r}")
            found.append((draft, target))
        return tuple(found)

    def validate(self) -> None:
        super().validate()
        require(bool(self.observations), "--observations must name at least one file")
        self.pairs()


@dataclass(frozen=True, kw_only=True)
class PlanOptimumOptions(VerbOptions):
    """Say which draft size is worth training for a target, and what it will give."""

    target_params: str
    """Parameters of the target: 1.3e10, 12853473280 or 13B (K, M, B, T)."""
    target_tokens: str
    """Tokens that the target was trained on, in the same forms."""
    draft_tokens: str
    """Tokens that the draft is to be trained on."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    integer: bool = False
    """Whole draft lengths only, as decoding has them."""
    draft_params: str | None = None
    """Say what a draft of this size gives, too."""
    cost_ratio: float | None = None
    """With --draft-params: measured seconds of one draft pass over those of one target pass, in
    place of the ratio of sizes."""
    cost_floor: float | None = None
    """Measured seconds of a pass of a small draft over those of a target pass: no size is taken to
    cost less than this."""
    out: Path | None = None
    """Write figures to this folder."""

    def sizes(self) -> tuple[float, float, float, float | None]:
        """Target parameters, target tokens, draft tokens, draft parameters (or None)."""
        draft = self.draft_params
        return (
            parse_count(self.target_params, "--target-params"),
            parse_count(self.target_tokens, "--target-tokens"),
            parse_count(self.draft_tokens, "--draft-tokens"),
            None if draft is None else parse_count(draft, "--draft-params"),
        )

    def validate(self) -> None:
        super().validate()
        target, _, _, draft = self.sizes()
        if draft is None:
            unused("--cost-ratio", self.cost_ratio, None, "--draft-params")
        else:
            small = draft < target
            require(small, f"--draft-params must be below --target-params, got {draft:g}")
        for name in ("cost_ratio", "cost_floor"):
            _positive(f"--{name.replace('_', '-')}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PlanSweepOptions(VerbOptions):
    """Fit rules of thumb for the draft size to the optima of many settings."""

    grid: Literal["paper", "printed", "exact"] = "paper"
    """paper: what gives the paper's digits; printed: the ranges that it prints; exact: the first,
    with optima that are solved for."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    out: Path | None = None
    """Write the optima and figures to this folder."""


@dataclass(frozen=True, kw_only=True)
class PlanAlphaOptions(VerbOptions):
    """Estimate the acceptance rate of a pair from counts, and test whether it is one rate."""

    counts: Annotated[Path, Leading]
    """CSV with columns gamma, accepted_length (without the target's own token) and count, or the
    folder of a `bench --perplexity`; intervals go by prompt where there is a column of that name.
    """
    draft: str | None = None
    """Of which draft model, where the file has several."""
    out: Path | None = None
    """Write a figure to this folder."""


@dataclass(frozen=True, kw_only=True)
class PlanFitOptions(VerbOptions):
    """Fit the loss law to your own training runs."""

    runs: Annotated[Path, Leading]
    """CSV with columns params, tokens, and loss (nats per token) or perplexity."""
    bootstrap: int = 200
    """Repeats for the intervals."""
    seed: int = 0
    """Keys the repeats."""
    out: Path | None = None
    """Write a figure to this folder."""

    def validate(self) -> None:
        super().validate()
        at_least(20, "--bootstrap", self.bootstrap)
        at_least(0, "--seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class PlanTableOptions(VerbOptions):
    """Recompute a table of the scaling-laws paper and set it beside what was printed."""

    number: Annotated[TableName, Leading]
    """Which table; or all."""
    out: Path | None = None
    """Write CSV files and figures to this folder."""


@dataclass(frozen=True, kw_only=True)
class PlanLadderOptions(VerbOptions):
    """Say which draft sizes to train for a budget: commands, and predictions to check later."""

    target: str | None = None
    """Folder of the target, whose config.json is read; or a hub id, with --target-params."""
    target_params: str | None = None
    """Parameters of the target: 1.3e10 or 13B (K, M, B, T); left out: counted in config.json."""
    target_tokens: str | None = None
    """Tokens that it was trained on; left out: what `pretrain` wrote beside it."""
    vocab_size: int = 32_000
    """Without a folder: size of its vocabulary, which drafts share."""
    tokens: str | None = None
    """Budget: tokens to pre-train each draft on, such as 2B."""
    flops: str | None = None
    """Budget: operations to pre-train each draft with, such as 1e18: six per weight and token."""
    hours: float | None = None
    """Budget, with --tokens-per-second: time to pre-train each draft."""
    tokens_per_second: float | None = None
    """With --hours: the rate of training, taken to be the same for every size."""
    laws: LawsOptions = field(default_factory=LawsOptions)
    cost_floor: float | None = None
    """Measured seconds of a pass of a small draft over those of a target pass: no size is taken to
    cost less than this."""
    text: tuple[str, ...] = ()
    """What to pre-train on, as for `pretrain`; left out: ladder.sh asks for it."""
    eval_text: tuple[str, ...] = ()
    """Held-out text to measure perplexities on; left out: ladder.sh asks for it."""
    prompts: Path | None = None
    """Prompts to distil on; left out: ladder.sh asks for them."""
    suite: str | None = None
    """Prompts to measure on; left out: ladder.sh asks for them."""
    out: Path = Path("runs/ladder")
    """Folder for ladder.json and ladder.sh, and of what that makes."""

    def training_tokens(self) -> float | None:
        """Of each draft, by --tokens or --hours; None: by --flops."""
        if self.tokens is not None:
            return parse_count(self.tokens, "--tokens")
        if self.hours is not None and self.tokens_per_second is not None:
            return 3600.0 * self.hours * self.tokens_per_second
        return None

    def validate(self) -> None:
        super().validate()
        ways = [self.tokens is not None, self.flops is not None, self.hours is not None]
        require(sum(ways) == 1, "give one budget: --tokens, --flops or --hours")
        if self.hours is None:
            unused("--tokens-per-second", self.tokens_per_second, None, "--hours")
        require(
            (self.hours is None) == (self.tokens_per_second is None),
            "--hours needs --tokens-per-second: the rate at which drafts are trained",
        )
        require(
            self.target is not None or self.target_params is not None,
            "give --target FOLDER, or --target-params and --target-tokens",
        )
        for name in ("hours", "tokens_per_second", "cost_floor"):
            _positive(f"--{name.replace('_', '-')}", getattr(self, name))
        for name in ("target_params", "target_tokens", "tokens", "flops"):
            if getattr(self, name) is not None:
                parse_count(getattr(self, name), f"--{name.replace('_', '-')}")
        total = self.training_tokens()
        require(
            total is None or 1 <= total < math.inf,
            f"--hours x --tokens-per-second must give a count of tokens of 1 or more, got {total}",
        )
        at_least(1, "--vocab-size", self.vocab_size)
        require("," not in str(self.out), f"--out must not hold a comma, got {self.out}")


@dataclass(frozen=True, kw_only=True)
class PlanCheckOptions(VerbOptions):
    """Set what `plan ladder` predicted beside what was measured later."""

    predictions: Annotated[Path, Leading]
    """The ladder.json."""
    records: tuple[Path, ...]
    """Folders that `bench` wrote, with and without --perplexity."""
    out: Path | None = None
    """Write check.json and a figure to this folder."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.records), "--records must name at least one folder")


def _positive(name: str, value: float | None) -> None:
    good = value is None or (math.isfinite(value) and value > 0)
    require(good, f"{name} must be above 0, got {value}")


def _numbers(text: str | None, flag: str, form: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    values = parse_list(text, float, name=flag)
    good = len(values) == len(form.split(",")) and all(map(math.isfinite, values))
    require(good, f"{flag} takes {form} as finite numbers, got {text!r}")
    return values
