"""The options of `draftsmith live VERB`; see `options`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Leading, Many, at_least, parse_list, require, unused
from draftsmith.core.config import check_bias
from draftsmith.data.prompts import MINI, check_prompt
from draftsmith.live.config import MaskConfig, PromptConfig, RedraftConfig
from draftsmith.serve.config import SessionLimits
from draftsmith.targets.config import ModelConfig

Feed = Literal["lines", "jsonl", "simulstreaming", "textflow", "google", "aws", "deepgram", "azure"]


@dataclass(frozen=True, kw_only=True)
class LiveTranslateOptions(VerbOptions):
    """Translate what comes in on stdin, anew with every line, drafting with the last output."""

    model: ModelConfig
    format: Feed = "lines"
    """Of the input: lines (a hypothesis each, an empty one ends the segment), jsonl, or what a
    recogniser sends."""
    bias: float = 0.2
    """How far verification leans towards the last output: 0 changes nothing, 0.5 keeps it all."""
    screen: MaskConfig = field(default_factory=MaskConfig)
    no_shrink: bool = False
    """Text that is on the screen and in the new output stays, whatever is hidden."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)
    out: Path | None = None
    """Write what happened to this file (JSONL, for `live score`)."""

    def validate(self) -> None:
        super().validate()
        check_bias(self.bias, "--bias")
        if not self.screen.mask_k:
            unused("--unit", self.screen.unit, "token", "--mask-k")


@dataclass(frozen=True, kw_only=True)
class LiveMakeStreamOptions(VerbOptions):
    """Turn sentences into streams of growing prefixes, as a recogniser would send them."""

    source: Annotated[Path, Leading]
    """Sentences, one per line, also .gz and .xz."""
    references: Path | None = None
    """Their translations, one per line."""
    lag: int = 3
    """Words by which a hypothesis grows."""
    unit: Literal["word", "char"] = "word"
    """char: for languages without blanks."""
    rewrites: float = 0.0
    """Chance that a hypothesis first comes with its last words wrong."""
    limit: int | None = None
    """Use only the first sentences."""
    seed: int = 0
    """Keys the rewrites."""
    out: Path = Path("runs/stream.jsonl")
    """The stream: a JSON object per line."""

    def validate(self) -> None:
        super().validate()
        at_least(1, "--lag", self.lag)
        at_least(1, "--limit", self.limit)
        at_least(0, "--seed", self.seed)
        require(0 <= self.rewrites <= 1, f"--rewrites must lie between 0 and 1: {self.rewrites}")


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
class LiveReplayOptions(VerbOptions):
    """Run a stream under many settings and compare flicker, quality and speed."""

    stream: Annotated[Path, Leading]
    """What `live make-stream` wrote, or a recording of the same form."""
    model: ModelConfig
    compare: str = "ar,ssbd"
    """ar: re-translation without drafts, the base of speed-ups. ssbd: with the last output."""
    bias: str = "0.2"
    """Biases of ssbd, separated by commas."""
    mask_k: str = "0"
    """Hidden tokens, separated by commas."""
    mask: Literal["display", "draft"] = "display"
    """display: only hide them. draft: leave them out of the draft, too."""
    limit: int | None = None
    """Use only the first segments."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)
    out: Path = Path("runs/replay")
    """Folder for tables, records, plots, subtitles and logs."""

    def methods(self) -> tuple[str, ...]:
        return parse_list(self.compare, str, name="--compare")

    def biases(self) -> tuple[float, ...]:
        return parse_list(self.bias, float, name="--bias")

    def masks(self) -> tuple[int, ...]:
        return parse_list(self.mask_k, int, name="--mask-k")

    def validate(self) -> None:
        super().validate()
        for method in self.methods():
            require(method in ("ar", "ssbd"), f"--compare knows ar and ssbd, got {method!r}")
        for bias in self.biases():
            check_bias(bias, "--bias")
        for hidden in self.masks():
            at_least(0, "--mask-k", hidden)
        at_least(1, "--limit", self.limit)
        if "ssbd" not in self.methods():
            unused("--bias", self.bias, "0.2", "ssbd in --compare")
            unused("--mask", self.mask, "display", "ssbd in --compare")
            for name, value in vars(RedraftConfig()).items():
                if name != "max_ratio":
                    flag = f"--{name.replace('_', '-')}"
                    unused(flag, getattr(self.redraft, name), value, "ssbd in --compare")


@dataclass(frozen=True, kw_only=True)
class LiveScoreOptions(VerbOptions):
    """Score what a live translation did: flicker, drafts, speed, latency, quality."""

    records: Annotated[Path, Leading]
    """What `live translate --out` or `live replay` wrote; or a folder with several replays, whose
    tables are joined: a line per language and target."""
    language: str = "German"
    """Language of the translations: chooses BLEU's words, and what latency counts."""
    source_language: str = "English"
    """The same of the sources."""
    stream: Path | None = None
    """The stream that these come from: where it has times, latencies are in seconds, too."""
    comet: bool = False
    """Score with wmt22-comet-da, too: its package and checkpoint must be on the machine."""
    texts: Path | None = None
    """Write source.txt, translation.txt and reference.txt to this folder, for other tools."""
    out: Path | None = None
    """Write a SimulEval-style log of stable delays to this file."""


@dataclass(frozen=True, kw_only=True)
class LiveServeOptions(VerbOptions):
    """Serve live translation: a WebSocket for programs, a page for people."""

    model: ModelConfig
    host: str = "127.0.0.1"
    """Address to listen at; the default is this machine alone."""
    port: int = 8765
    """0 takes a free one."""
    bias: float = 0.2
    """How far verification leans towards the last output, unless a session says otherwise."""
    screen: MaskConfig = field(default_factory=MaskConfig)
    limits: SessionLimits = field(default_factory=SessionLimits)
    token: str | None = None
    """Clients have to give it as ?token=..."""
    allow_origin: Many = ()
    """A web site whose pages may connect, beside the server's own."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)

    def validate(self) -> None:
        super().validate()
        check_bias(self.bias, "--bias")
        if not self.screen.mask_k:
            unused("--unit", self.screen.unit, "token", "--mask-k")
        require(0 <= self.port < 65536, f"--port must lie between 0 and 65535, got {self.port}")
        sentence = "--then cannot be served: what a drafter remembers is one translation's"
        require(self.redraft.then is None, sentence)
        require(not self.json, "--json: a server prints no object; its figures are at /metrics")
