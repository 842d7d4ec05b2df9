"""The configuration of live translations (prompt, drafting, display), and of a server of them.

The command line nests `PromptConfig`, `RedraftConfig`, `MaskConfig` and `SessionLimits`;
`DisplayConfig` and `LiveConfig` add what a program sets, and are checked when they are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from draftsmith.config import Configuration, at_least, each_at_least, require
from draftsmith.core.config import MOST_NODES, check_bias
from draftsmith.data.prompts import check_prompt
from draftsmith.errors import InputError

Unit = Literal["token", "word", "char"]


@dataclass(frozen=True, kw_only=True)
class PromptConfig(Configuration):
    """How a source becomes a prompt."""

    language: str = "German"
    """The language to translate into, as the prompt names it."""
    template: str = "auto"
    """mini (what the shipped model was trained with), instruction, chat, or a text with {source}
    and {language}; auto: chat where the model has a chat template, else mini."""
    context: int = 0
    """Earlier segments, with their translations, in the prompt."""

    def validate(self) -> None:
        require(bool(self.language.strip()), "--language must not be empty")
        if self.template not in ("auto", "mini", "instruction", "chat"):
            check_prompt(self.template, "--template must be auto, mini, instruction, chat, or")
        each_at_least(0, self, "context")


@dataclass(frozen=True, kw_only=True)
class RedraftConfig(Configuration):
    """How the last output is drafted from."""

    final_bias: float | None = None
    """Bias of final updates: 0 gives the text of offline greedy translation. Left out: --bias."""
    revision_bias: float | None = None
    """Bias of updates in which earlier words of the source changed. Left out: --bias."""
    resync: int = 0
    """Behind a divergence, draft so many tokens from the old tail where it is found again."""
    then: str | None = None
    """A drafter for what lies behind the divergence (see `draftsmith generate --help`)."""
    trim_full_stop: bool = False
    """Do not draft a closing full stop: the sentence may go on."""
    min_common: float = 0.0
    """Do not draft where less than this share of the last source's words is left."""
    max_ratio: float = 2.0
    """Longest output, in tokens of the source; 32 more are allowed."""

    def validate(self) -> None:
        for name, bias in (("final", self.final_bias), ("revision", self.revision_bias)):
            if bias is not None:
                check_bias(bias, f"--{name}-bias")
        each_at_least(0, self, "resync", most=MOST_NODES)
        share = 0 <= self.min_common <= 1
        require(share, f"--min-common must lie between 0 and 1, got {self.min_common}")
        good = math.isfinite(self.max_ratio) and self.max_ratio >= 0
        require(good, f"--max-ratio must be 0 or more, got {self.max_ratio}")


@dataclass(frozen=True, kw_only=True)
class MaskConfig(Configuration):
    """What is on the screen before a segment is final."""

    mask_k: int = 0
    """Hide so many units at the end."""
    unit: Unit = "token"
    """What --mask-k counts; a char is a grapheme cluster."""
    agree: int | None = None
    """Show what so many outputs in a row have in common, instead of hiding the end."""
    whole_words: bool = False
    """Show no parts of words; scripts without blanks are not affected."""

    def validate(self) -> None:
        if self.unit not in get_args(Unit):
            raise InputError(f"--unit must be one of {', '.join(get_args(Unit))}: {self.unit!r}")
        each_at_least(0, self, "mask_k")
        each_at_least(2, self, "agree")
        hides = self.mask_k == 0 or self.agree is None
        require(hides, "--mask-k and --agree are two ways to hide: choose one")


@dataclass(frozen=True, kw_only=True)
class DisplayConfig(MaskConfig):
    """How a display hides the end of an output."""

    no_shrink: bool = False
    """Text that is on the screen and in the new output stays, whatever is hidden."""

    def __post_init__(self) -> None:
        self.validate()


@dataclass(frozen=True, kw_only=True)
class LiveConfig(RedraftConfig):
    """How a live translation decodes and displays. SSBD's values: bias 0.2, also in final updates.

    Raises:
        InputError: a value is out of its range.
    """

    redraft: bool = True
    """Draft with the last output; without, this is autoregressive re-translation."""
    bias: float = 0.2
    """How far verification leans towards the draft: 0 changes nothing, 0.5 keeps every token."""
    trim_draft: int = 0
    """Tokens left out at the end of the draft (the paper's mask-k; a display that hides them costs
    no draft)."""
    max_extra: int = 32
    """Output tokens allowed beyond `max_ratio`. An output that reaches the limit is not drafted
    from."""
    context: int = 0
    """Earlier segments, with their translations, in the prompt."""
    display: DisplayConfig = field(default_factory=DisplayConfig)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        super().validate()
        check_bias(self.bias, "--bias")
        each_at_least(0, self, "context")
        at_least(0, "trim_draft", self.trim_draft)
        at_least(1, "max_extra", self.max_extra)
        if self.resync and not self.redraft:
            raise InputError("--resync drafts from the old tail, which needs redraft")

    def bias_of(self, *, final: bool, revised: bool) -> float:
        """The bias of one update; a final one uses `final_bias` first."""
        if final and self.final_bias is not None:
            return self.final_bias
        if revised and self.revision_bias is not None:
            return self.revision_bias
        return self.bias


@dataclass(frozen=True, kw_only=True)
class SessionLimits(Configuration):
    """How many sessions a server keeps, and for how long."""

    sessions: int = 32
    """Sessions at a time; connections: four times as many."""
    per_address: int | None = None
    """Likewise from one address (of IPv6: one network of 64 bits); left out: half of --sessions."""
    keep_seconds: float = 60.0
    """How long a session waits for its client to come back; where others want its place, two
    seconds."""

    @property
    def most_of_one(self) -> int:
        """Sessions of one address at a time."""
        return (self.sessions + 1) // 2 if self.per_address is None else self.per_address

    @property
    def connections(self) -> int:
        """Connections at a time."""
        return 4 * self.sessions

    @property
    def per_address_connections(self) -> int:
        """Connections of one address at a time."""
        return 4 * self.most_of_one

    def validate(self) -> None:
        each_at_least(1, self, "sessions", "per_address")
        good = math.isfinite(self.keep_seconds) and self.keep_seconds >= 0
        require(good, f"--keep-seconds must be 0 or more, got {self.keep_seconds}")


def check_stream(lag: int, rewrites: float = 0.0) -> None:
    """Raise InputError for a lag or a chance of rewrites out of its range."""
    at_least(1, "--lag", lag)
    require(0 <= rewrites <= 1, f"--rewrites must lie between 0 and 1: {rewrites}")


def check_prefixes(share: float) -> None:
    """Raise InputError for a share of prefixes out of its range."""
    require(0 <= share < 1, f"--prefixes must lie in [0, 1): {share}")
