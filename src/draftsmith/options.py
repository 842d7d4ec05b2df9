"""The options of every verb: `draftsmith VERB` is `VerbOptions` here and `recipes/verb.py`.

A field is a flag (`max_new_tokens` is `--max-new-tokens`) and the text below it is the flag's help.
Groups that several verbs share are nested; their fields are flags of the verb all the same.
`validate` raises `InputError` in one sentence. Nothing here imports torch: `--help` must be quick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from draftsmith.config import parse_list
from draftsmith.option_groups import (
    ArchitectureOptions,
    DraftingOptions,
    Many,
    ModelOptions,
    SamplingOptions,
    ScheduleOptions,
    TextOptions,
    VerbOptions,
    at_least,
    check_temperature,
    require,
)


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(VerbOptions):
    """Show the main job with the small models that ship with draftsmith."""

    out: Path = Path("runs/quickstart")
    """Folder for report.html, summary.json, records.jsonl and run.json."""
    temperature: str = "0,0.8"
    """Temperatures to measure at, separated by commas."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    limit: int | None = None
    """How many of the prompts to use; left out: all."""
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
    """Continue prompts with a target and a drafter, without changing what the target says."""

    model: ModelOptions
    drafter: str = "none"
    """none, prompt_lookup, lookahead, independent:MODEL, prediction, or a draft model's folder."""
    prompt: Many = ()
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
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)

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
        self.drafting.check_assignments((self.drafter,))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(VerbOptions):
    """Measure drafters against plain decoding, interleaved in one process."""

    model: ModelOptions
    drafter: str = "none,prompt_lookup"
    """Drafters to compare, separated by commas (see `draftsmith generate --help`)."""
    suite: str
    """A prompt file (JSONL or one per line, also .gz and .xz) or the name of a built-in suite."""
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
    out: Path = Path("runs/bench")
    """Folder for report.html, summary.json, records.jsonl and run.json."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)

    def drafters(self) -> tuple[str, ...]:
        return parse_list(self.drafter, str, name="--drafter")

    def temperatures(self) -> tuple[float, ...]:
        return parse_list(self.temperature, float, name="--temperature")

    def validate(self) -> None:
        super().validate()
        for value in self.temperatures():
            check_temperature(value)
        drafters = self.drafters()
        twice = len(set(drafters)) < len(drafters)
        require(not twice, f"--drafter names one twice: {self.drafter}")
        self.drafting.check_assignments(drafters)
        require(bool(self.suite.strip()), "--suite must name a prompt file or a built-in suite")
        at_least(1, "--limit", self.limit)
        at_least(1, "--max-new-tokens", self.max_new_tokens)
        at_least(1, "--batch-size", self.batch_size)
        at_least(1, "--repeats", self.repeats)
        at_least(0, "--warmup", self.warmup)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(VerbOptions):
    """Report versions, devices, memory bandwidth and what will work on this machine."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(VerbOptions):
    """Train a small model from text: a drafter in a target's family, or a model of its own."""

    data: TextOptions
    model: ArchitectureOptions = field(default_factory=ArchitectureOptions)
    training: ScheduleOptions = field(default_factory=ScheduleOptions)
    out: Path
    """Folder for the model; an interrupted run with the same --out continues."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the forward pass; auto is bfloat16 where it is fast. Weights are float32."""
    save_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the saved model."""
    seed: int = 0
    """Keys the first weights, the order of the text and all noise."""
    save_every: int = 200
    """Steps between checkpoints."""
    eval_every: int = 0
    """Steps between evaluations on part of the held-out text; 0: only at the end."""
    report_to: str = "none"
    """Where figures go beside stderr: tensorboard, wandb, trackio, ... or several by comma."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.data.text), "--text must name at least one file or folder")
        require(0 <= self.data.hold_out < 1, "--hold-out must be at least 0 and less than 1")
        names = "layers heads kv_heads hidden intermediate context vocab_subset".split()
        for name in names:
            at_least(1, f"--{name.replace('_', '-')}", getattr(self.model, name))
        init = self.model.init
        require(
            init == "random" or (init.startswith("subclone:") and init != "subclone:"),
            f"--init must be random or subclone:TARGET, got {init!r}",
        )
        subset = self.model.vocab_subset
        require(
            subset is None or self.model.tokenizer is not None, "--vocab-subset needs --tokenizer"
        )
        at_least(300, "--vocab-size", self.model.vocab_size)
        training = self.training
        for name in ("block_length", "long_block_length"):
            at_least(2, f"--{name.replace('_', '-')}", getattr(training, name))
        require(0 < training.long_share <= 1, "--long-share must be above 0 and at most 1")
        rates = (training.min_learning_rate, training.learning_rate, training.weight_decay)
        require(all(math.isfinite(rate) and rate >= 0 for rate in rates), "rates must be 0 or more")
        for name in ("save_every", "gradient_accumulation", "batch_tokens"):
            value = getattr(self, name, None) or getattr(training, name, None)
            at_least(1, f"--{name.replace('_', '-')}", value)
        at_least(0, "--eval-every", self.eval_every)
        at_least(0, "--warmup", training.warmup)
        at_least(0, "--seed", self.seed)
