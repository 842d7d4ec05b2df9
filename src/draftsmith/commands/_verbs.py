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

from draftsmith.commands._options import VerbOptions
from draftsmith.config import (
    Duration,
    Leading,
    Many,
    at_least,
    each_at_least,
    parse_list,
    require,
    unused,
)
from draftsmith.core.config import SamplingOptions, check_temperature
from draftsmith.data.config import TextOptions
from draftsmith.distill.config import (
    ArchitectureOptions,
    BadPromptOptions,
    DivergenceOptions,
    FittingOptions,
    ImitationOptions,
    KeptOptions,
    ScaleOptions,
    ScheduleOptions,
)
from draftsmith.drafters.config import DraftingOptions
from draftsmith.targets.config import ModelOptions


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(VerbOptions):
    """Show the main job with the small models that ship with draftsmith."""

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
        self.drafting.refuse_range()
        self.drafting.check_assignments((self.drafter,))


@dataclass(frozen=True, kw_only=True)
class BenchOptions(VerbOptions):
    """Measure drafters against plain decoding, interleaved in one process."""

    model: ModelOptions
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
        require(bool(self.suite.strip()), "--suite must name a prompt file or an installed suite")
        each_at_least(1, self, "limit", "max_new_tokens", "batch_size", "repeats")
        at_least(0, "--warmup", self.warmup)
        if not self.perplexity:
            self.drafting.refuse_range()
            return
        self.drafting.check_lengths()
        timed = (self.repeats, self.warmup, self.hf_baseline) != (3, 1, True)
        flags = "--repeats, --warmup and --no-hf-baseline"
        require(not timed, f"{flags} are for measuring speed: leave them out with --perplexity")


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
        at_least(1, "--save-every", self.save_every)
        at_least(0, "--eval-every", self.eval_every)
        at_least(0, "--seed", self.seed)


@dataclass(frozen=True, kw_only=True)
class CollectOptions(VerbOptions):
    """Collect what a target says: trajectories and laws to distil a draft model from."""

    model: ModelOptions
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
    kept: KeptOptions = field(default_factory=KeptOptions)
    max_new_tokens: int = 256
    """Longest continuation; a longer reference of --gold is cut there, and counted."""
    batch_size: int = 16
    """Texts that are continued together."""
    scale: ScaleOptions = field(default_factory=ScaleOptions)
    bad_prompts: BadPromptOptions = field(default_factory=BadPromptOptions)
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
class DistillOptions(VerbOptions):
    """Train a draft model to say what a target says: from a store, or with the target at hand."""

    target: str
    """Folder or hub id of the target: its tokenizer, and its laws with --laws teacher."""
    drafter: str
    """A draft model to start from (folder or hub id), or a kind of drafter over hidden states:
    eagle, eagle3, hass, fspad, griffin, medusa, or one of these with a folder, KIND:FOLDER."""
    drafter_option: Many = ()
    """An option of that drafter, as KEY=VALUE."""
    store: tuple[Path, ...] = ()
    """Stores that `draftsmith collect` wrote."""
    online: bool = False
    """Let the target continue --prompts while training, anew for every step."""
    prompts: Path | None = None
    """With --online: JSONL or one per line, also .gz and .xz."""
    bad_prompts: BadPromptOptions = field(default_factory=BadPromptOptions)
    on_policy: float = 0.0
    """With --online: the share of prompts that the draft model continues itself."""
    prompts_per_step: int = 8
    """With --online: prompts per optimiser step."""
    beams: int | None = None
    """With --online: beams of the target per prompt (left out: one sample); with --store: use only
    the best so many trajectories of each prompt."""
    max_new_tokens: int = 128
    """With --online: longest continuation."""
    laws: Literal["store", "teacher"] = "store"
    """Laws as stored, or the whole ones of the target, which is then loaded (--online: always)."""
    fitting: FittingOptions = field(default_factory=FittingOptions)
    objective: DivergenceOptions = field(default_factory=lambda: DivergenceOptions())
    imitation: ImitationOptions = field(default_factory=lambda: ImitationOptions())
    aggregate: Literal["per_beam", "mixture"] = "per_beam"
    """Several trajectories: each has its own laws, or all the mean of theirs."""
    beam_weights: Literal["uniform", "score"] = "uniform"
    """Several trajectories count alike, or by the softmax of their scores."""
    score_temperature: float = 1.0
    """With --beam-weights score: divides the scores."""
    text: tuple[str, ...] = ()
    """Pre-training text to mix in: files, folders or glob patterns, as for `pretrain`."""
    text_share: float = 0.1
    """With --text: its share of --batch-tokens; with --online it stands beside the prompts."""
    hold_out: float = 0.05
    """Share of prompts, by a hash of their tokens, on which acceptance is measured."""
    training: ScheduleOptions = field(
        default_factory=lambda: ScheduleOptions(
            duration="3epochs",
            block_length=512,
            batch_tokens=8192,
            learning_rate=3e-4,
            warmup=50,
            schedule="cosine",
            betas=(0.9, 0.999),
            weight_decay=0.0,
        )
    )
    out: Path
    """Folder for the draft model; an interrupted run with the same --out continues."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the forward pass; auto is bfloat16 where it is fast. Weights are float32."""
    save_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the saved model."""
    save_every: int = 200
    """Steps between checkpoints."""
    eval_every: int = 100
    """Steps between measurements of held-out acceptance; the best weights are kept."""
    report_to: str = "none"
    """Where figures go beside stderr: tensorboard, wandb, trackio, ... or several by comma."""
    seed: int = 0
    """Keys the order of the data and all draws."""

    def validate(self) -> None:
        super().validate()
        require(bool(self.store) != self.online, "give either --store FOLDER or --online")
        duration = Duration.parse(self.training.duration)
        if self.online:
            require(self.prompts is not None, "--online needs --prompts FILE")
            self.fitting.refuse()
            require(
                duration.unit != "token",
                f"--duration {self.training.duration} cannot be kept with --online: how many "
                "tokens a step has depends on the answers; give steps or epochs",
            )
        else:
            require(self.prompts is None, "--prompts is for --online; a store has its own")
            unused("--on-bad-prompt", self.bad_prompts.on_bad_prompt, "skip", "--online")
            unused("--on-policy", self.on_policy, 0.0, "--online")
            unused("--prompts-per-step", self.prompts_per_step, 8, "--online")
            unused("--max-new-tokens", self.max_new_tokens, 128, "--online")
        for text in self.drafter_option:
            good = bool(text.partition("=")[1] and text.partition("=")[0].strip())
            require(good, f"--drafter-option must be KEY=VALUE, got {text!r}")
        if not self.text:
            unused("--text-share", self.text_share, 0.1, "--text")
        if self.beam_weights == "uniform":
            unused("--score-temperature", self.score_temperature, 1.0, "--beam-weights score")
        require(0 <= self.on_policy <= 1, "--on-policy is a share between 0 and 1")
        require(0 <= self.hold_out < 1, "--hold-out must be at least 0 and less than 1")
        require(0 < self.text_share < 1, "--text-share must lie between 0 and 1")
        require(self.score_temperature > 0, "--score-temperature must be above 0")
        mixture = self.aggregate == "mixture"
        require(
            not (mixture and (self.online or self.laws == "teacher")),
            "--aggregate mixture takes the laws of a store: leave out --online and --laws teacher",
        )
        each_at_least(1, self, "prompts_per_step", "beams", "max_new_tokens", "save_every")
        at_least(0, "--eval-every", self.eval_every)
        at_least(0, "--seed", self.seed)
        require(
            self.training.long_block_length is None,
            "--long-block-length is for `pretrain`: trajectories are not cut",
        )


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
