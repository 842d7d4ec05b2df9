"""The options of every verb: `draftsmith VERB` is `VerbOptions` here and `commands/verb.py`.

A field is a flag (`max_new_tokens` is `--max-new-tokens`) and the text below it is the flag's help.
Groups that several verbs share are nested; their fields are flags of the verb all the same.
`validate` raises `InputError` in one sentence. Nothing here imports torch: `--help` must be quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from draftsmith.bench.config import BenchConfig, TuneConfig
from draftsmith.commands._options import VerbOptions
from draftsmith.config import (
    Leading,
    Many,
    at_least,
    each_at_least,
    parse_list,
    require,
    unused,
)
from draftsmith.core.config import SamplingConfig, check_temperature
from draftsmith.distill.config import (
    BadPromptConfig,
    DistillConfig,
    KeptConfig,
    PretrainConfig,
    ScaleConfig,
)
from draftsmith.drafters.config import DraftingConfig
from draftsmith.targets.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(VerbOptions):
    """Run the demo on the small models that ship with draftsmith: decode, distil, measure."""

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
        return parse_list(self.temperature, float, name="--temperature")

    def validate(self) -> None:
        super().validate()
        for value in self.temperatures():
            check_temperature(value)
        at_least(1, "--max-new-tokens", self.max_new_tokens)
        at_least(1, "--limit", self.limit)
        at_least(0, "--seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(VerbOptions):
    """Continue prompts with a target and a drafter; the output distribution is the target's."""

    model: ModelConfig
    drafter: str = "none"
    """none, prompt_lookup, lookahead, independent:MODEL, prediction, or a draft model's folder."""
    prompt: Annotated[Many, Leading] = ()
    """A prompt; may be given several times."""
    prompts: Path | None = None
    """A file of prompts: JSONL or one per line, also .gz and .xz."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    max_new_tokens: int = 128
    """Stop each continuation after this many tokens."""
    batch_size: int = 1
    """Prompts that are decoded together."""
    stop: Many = ()
    """Stop when this text appears; may be given several times."""
    temperature: float = 0.0
    """0 takes the most probable token; 1 draws from the model's own law."""
    stream: bool = False
    """Print tokens as they come; drafted tokens that were accepted are coloured."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)

    def validate(self) -> None:
        super().validate()
        check_temperature(self.temperature)
        at_least(1, "--max-new-tokens", self.max_new_tokens)
        at_least(1, "--batch-size", self.batch_size)
        at_least(1, "--limit", self.limit)
        given = bool(self.prompt) + (self.prompts is not None)
        require(given == 1, "give prompts either by --prompt TEXT or by --prompts FILE")
        require(all(self.prompt), "--prompt must not be empty")
        require(all(self.stop), "--stop must not be empty")
        require(bool(self.drafter.strip()), "--drafter must not be empty; 'none' drafts nothing")
        require(not (self.stream and self.json), "--stream and --json exclude each other")
        self.drafting.refuse_range()
        self.drafting.check_assignments((self.drafter,))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchConfig, VerbOptions):
    """Measure drafters against plain decoding, interleaved in one process."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(VerbOptions):
    """Report versions, devices, memory bandwidth and what will work on this machine."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(PretrainConfig, VerbOptions):
    """Train a small model from text: a drafter in a target's family, or a model of its own."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(VerbOptions):
    """Collect a target's continuations and logprobs, to distil a draft model from."""

    model: ModelConfig
    prompts: Path
    """Prompts: JSONL or one per line, also .gz and .xz."""
    limit: int | None = None
    """Use only the first prompts of the file."""
    system: Many = ()
    """A system prompt for chats; several take turns."""
    out: Path
    """Folder of the store; a repeated command does what is missing."""
    samples: int | None = None
    """Draw so many continuations per prompt and temperature."""
    temperatures: str = "1"
    """With --samples: temperatures, separated by commas; 0 is greedy."""
    top_p: float = 1.0
    """With --samples: keep the most probable tokens that together reach this probability."""
    beams: int | Literal["auto"] | None = None
    """Beam search of this width; auto: as many per prompt as still add probability."""
    max_beams: int = 16
    """With --beams auto: never more."""
    mass_gain: float = 0.05
    """With --beams auto: a further beam must add this share to the probability of those before."""
    length_penalty: float = 0.0
    """With --beams: compare by score / length ** this."""
    gold: bool = False
    """Take the field `reference` of the prompts as continuations."""
    kept: KeptConfig = field(default_factory=KeptConfig)
    max_new_tokens: int = 256
    """Longest continuation; a longer reference of --gold is cut there, and counted."""
    batch_size: int = 16
    """Texts that are continued together."""
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    bad_prompts: BadPromptConfig = field(default_factory=BadPromptConfig)
    seed: int = 0
    """Seed of all draws."""

    def validate(self) -> None:
        super().validate()
        ways = [self.samples is not None, self.beams is not None, self.gold]
        require(sum(ways) <= 1, "give one of --samples, --beams and --gold (none: greedy)")
        given = self.sample_temperatures()
        for value in given:
            check_temperature(value)
        twice = len(set(given)) < len(given)
        require(not twice, f"--temperatures names one twice: {self.temperatures}")
        if self.samples is None:
            unused("--temperatures", self.temperatures, "1", "--samples")
            unused("--top-p", self.top_p, 1.0, "--samples")
        if self.beams is None:
            unused("--length-penalty", self.length_penalty, 0.0, "--beams")
        if self.beams != "auto":
            unused("--max-beams", self.max_beams, 16, "--beams auto")
            unused("--mass-gain", self.mass_gain, 0.05, "--beams auto")
        if self.scale.backend == "vllm":  # it batches and chooses kernels by itself
            unused("--batch-size", self.batch_size, 16, "--backend transformers")
            unused("--device", self.model.device, "auto", "--backend transformers")
            kernel = self.model.attn_implementation
            unused("--attn-implementation", kernel, "sdpa", "--backend transformers")
        require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}")
        each_at_least(1, self, "limit", "samples", "max_beams", "max_new_tokens", "batch_size")
        if isinstance(self.beams, int):
            at_least(1, "--beams", self.beams)
        require(self.mass_gain > 0, f"--mass-gain must be above 0, got {self.mass_gain}")
        good = math.isfinite(self.length_penalty)
        require(good, f"--length-penalty must be a finite number, got {self.length_penalty}")
        at_least(0, "--seed", self.seed)
        require(all(self.system), "--system must not be empty")

    def sample_temperatures(self) -> tuple[float, ...]:
        return parse_list(self.temperatures, float, name="--temperatures")


@dataclass(frozen=True, kw_only=True)
class DistillOptions(DistillConfig, VerbOptions):
    """Distil a drafter from a target: offline from a store, or online with the target loaded."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions(VerbOptions):
    """Compare finished runs of `distill` and `bench`: ranked table, figures, one page."""

    runs: Annotated[tuple[Path, ...], Leading]
    """Folders of runs; seeds of one setting are pooled."""
    base: str | None = None
    """Label of the undistilled draft; left out: runs whose objective is none."""
    out: Path = Path("runs/report")
    """Folder for comparison.html, .csv, .json and figures."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.runs), "--runs must name at least one folder")


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TuneConfig, VerbOptions):
    """Find the best drafter, length or tree for this machine, or that none pays."""
