"""Configurations of pretraining, collecting and distilling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from draftsmith.config import (
    Configuration,
    Duration,
    Many,
    each_at_least,
    each_unused,
    parse_bytes,
    parse_list,
    require,
)
from draftsmith.core.config import check_seed, parse_temperatures
from draftsmith.data.text import TextConfig
from draftsmith.drafters.config import check_options
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.distill.trajectories.types import CollectSettings

_MOST_LAYERS = 1024
"""A layer is some modules of Python: to make thousands takes minutes."""
_MOST_BEAMS = 4096
_MOST_SAMPLES = 65536
"""Each beam of a prompt is a row of the target's cache, each sample a request."""
Size = Literal["tiny", "1m", "8m", "30m", "50m"]
"""Presets of `pretrain`; see `distill/model_sizes.py`."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig(Configuration):
    """The model; a dimension that is left out comes from --size."""

    size: Size = "8m"
    """Preset of layers and widths; the number counts parameters without embeddings."""
    layers: int | None = None
    """Decoder layers."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention); left out: as many as heads."""
    hidden: int | None = None
    """Width of the residual stream."""
    intermediate: int | None = None
    """Width of the feed-forward layers."""
    context: int | None = None
    """Positions the model is declared for; left out: the target's, or the longest block."""
    tokenizer: str | None = None
    """A target, folder or hub id: take its tokenizer and its model family."""
    vocab_size: int = 8192
    """Without --tokenizer: size of the byte-level BPE that is trained."""
    vocab_subset: int | None = None
    """Keep only this many tokens of the target's: the most frequent of the text, end tokens too."""
    init: str = "random"
    """random, or subclone:TARGET to cut the first weights from the target's."""

    def validate(self) -> None:
        names = "heads kv_heads hidden intermediate context vocab_subset".split()
        each_at_least(1, self, *names)
        each_at_least(1, self, "layers", most=_MOST_LAYERS)
        init = self.init
        require(
            init == "random" or (init.startswith("subclone:") and init != "subclone:"),
            f"--init must be random or subclone:TARGET, got {init!r}",
        )
        whole = self.vocab_subset is None or self.tokenizer is not None
        require(whole, "--vocab-subset needs --tokenizer")
        each_at_least(300, self, "vocab_size")
        require(
            self.tokenizer is None or self.vocab_size == ArchitectureConfig.vocab_size,
            "--vocab-size is for a tokenizer that is trained: leave it out with --tokenizer",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Configuration):
    """How long, in what batches, at what rate."""

    duration: str = "1epochs"
    """How long to train: 2000steps, 3epochs or 5Mtokens."""
    block_length: int = 2048
    """Tokens per block."""
    long_block_length: int | None = None
    """Use blocks of this length at the end, to teach far positions at little cost."""
    long_share: float = 0.15
    """The share of the steps that --long-block-length is used for."""
    batch_tokens: int = 65536
    """Tokens per optimiser step, a multiple of the block length."""
    gradient_accumulation: int = 1
    """Passes that a batch is divided into, to save memory."""
    learning_rate: float = 1e-4
    """Highest learning rate."""
    min_learning_rate: float = 1e-6
    """Learning rate at the end."""
    warmup: int = 100
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "stable"] = "linear"
    """After the warm-up: linear or cosine decay, or constant and then linear decay."""
    decay_share: float = 0.3
    """With --schedule stable: the share of the steps that decay. --duration may be changed when an
    interrupted run is resumed before it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the moment estimates."""
    weight_decay: float = 0.1
    """AdamW: decay of matrices."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; inf: no limit."""
    clip_value: float = math.inf
    """Largest number in the gradient, as EAGLE's trainings clip; left out: no limit."""
    parallel: Literal["data", "sharded"] = "data"
    """Several processes: each holds all weights, or a share of them (FSDP2)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deepspeed: Path | None = None
    """Refused: DeepSpeed cannot resume a run; use --parallel sharded (FSDP2)."""

    @property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return max(self.block_length, self.long_block_length or 0)

    def validate(self) -> None:
        each_at_least(2, self, "block_length", "long_block_length")
        require(  # a model would be declared for fewer positions than it has learnt
            self.long_block_length in (None, self.longest),
            f"--long-block-length must be at least --block-length, which is {self.block_length}, "
            f"got {self.long_block_length}",
        )
        require(0 < self.long_share <= 1, "--long-share must be above 0 and at most 1")
        require(0 < self.decay_share <= 1, "--decay-share must be above 0 and at most 1")
        if self.long_block_length is None:
            each_unused("--long-block-length", self, "long_share")
        if self.schedule != "stable":
            each_unused("--schedule stable", self, "decay_share")
        Duration.parse(self.duration)
        for name in ("min_learning_rate", "learning_rate", "weight_decay"):
            rate = getattr(self, name)
            good = math.isfinite(rate) and rate >= 0
            require(good, f"--{name.replace('_', '-')} must be 0 or more, got {rate}")
        require(
            self.min_learning_rate <= self.learning_rate,
            f"--learning-rate {self.learning_rate:g} must be at least --min-learning-rate, which "
            f"is {self.min_learning_rate:g}",
        )
        # AdamW moves a weight by about the rate, and shrinks it by its product with the decay
        for name, step in (
            ("", self.learning_rate),
            (" times --weight-decay", self.learning_rate * self.weight_decay),
        ):
            short_step = f"--learning-rate{name} must be at most 1, or training diverges"
            require(step <= 1, f"{short_step}: it is {step:g}")
        positive = self.clip_norm > 0 and self.clip_value > 0
        require(positive, "--clip-norm and --clip-value must be above 0 (inf: no limit)")
        good = all(0 <= beta < 1 for beta in self.betas)
        require(good, f"--betas must be at least 0 and below 1, got {self.betas}")
        each_at_least(1, self, "gradient_accumulation", "batch_tokens")
        each_at_least(0, self, "warmup")
        require(
            self.deepspeed is None,
            "--deepspeed is no longer supported, because DeepSpeed cannot resume a run: start "
            "several processes with accelerate and use --parallel sharded (FSDP2) instead",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(ScheduleConfig):
    """A schedule with its number of steps, and what else the trainer has to know."""

    steps: int
    """Optimiser steps in all."""
    precision: Literal["bfloat16", "float32"] = "float32"
    """Precision of the forward pass; master weights stay as they are given."""
    seed: int = 0
    """Keys the noise of every step."""
    save_every: int = 500
    """Steps between checkpoints; the end and an interruption always save one."""
    keep: int = 2
    """Checkpoints kept."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    max_skipped: int = 20
    """Stop after this many steps in a row with a non-finite loss or gradient, or with none."""

    def __post_init__(self) -> None:
        self.validate()
        each_at_least(1, self, "save_every", "steps", "keep")

    @property
    def decay_from(self) -> int:
        """First step at which the rate is below its highest value again."""
        stable = self.steps - max(1, round(self.steps * self.decay_share))
        return max(self.warmup, stable) if self.schedule == "stable" else self.warmup

    def rate(self, step: int) -> float:
        """Learning rate of step `step` (0-based)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if step < self.decay_from:
            return self.learning_rate
        done = (step - self.decay_from) / max(1, self.steps - self.decay_from)
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * left


@dataclass(frozen=True, kw_only=True)
class BadPromptConfig(Configuration):
    """What becomes of prompts of a file that cannot be used."""

    on_bad_prompt: Literal["skip", "error"] = "skip"
    """Prompts that are empty, over-long or otherwise of no use: count and leave out, or stop."""


@dataclass(frozen=True, kw_only=True)
class KeptConfig(Configuration):
    """What is kept of every place of a trajectory, beside its token."""

    top_k: int = 50
    """Keep the teacher's k most probable tokens at each place; 0: its whole law."""
    features: str = ""
    """Keep hidden states too: those that a drafter reads (`eagle3`), or layer numbers and `last`
    (after the final norm), by commas."""

    def feature_words(self) -> tuple[str, ...]:
        """`features`, word by word."""
        return parse_list(self.features, str, name="--features") if self.features else ()

    def validate(self) -> None:
        each_at_least(0, self, "top_k")
        self.feature_words()


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(Configuration):
    """How a collection is divided, who computes it, and how large it may become."""

    shard_size: int = 256
    """Prompts per shard: what an interruption can lose at most."""
    backend: Literal["transformers", "vllm"] = "transformers"
    """What runs the target."""
    ray: bool = False
    """Spread shards over a Ray cluster (or over this machine)."""
    workers: int = 2
    """With --ray: actors."""
    max_bytes: str = ""
    """Largest size of the store, such as 20GB; empty: no limit."""

    def most_bytes(self) -> int | None:
        """`max_bytes` as a number; None: no limit."""
        return parse_bytes(self.max_bytes, "--max-bytes") if self.max_bytes else None

    def validate(self) -> None:
        if not self.ray:
            each_unused("--ray", self, "workers")
        each_at_least(1, self, "shard_size", "workers")
        self.most_bytes()


@dataclass(frozen=True, kw_only=True)
class FittingConfig(Configuration):
    """Which texts of a store are used, and how they are put into blocks."""

    on_bad_shard: Literal["stop", "skip"] = "stop"
    """A damaged shard of a store: stop, or warn and train on the others."""
    long_texts: Literal["cut", "drop"] = "cut"
    """A text that is longer than --block-length loses its end, or is left out."""
    one_per_block: bool = False
    """A block is one text and padding, in place of as many texts as fit."""

    def refuse(self) -> None:
        """Raise `InputError` where one is given, and no store."""
        each_unused("--store", self, "on_bad_shard", "long_texts", "one_per_block")


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(Configuration):
    """What a drafter over hidden states learns beside the divergence; left out: as published."""

    token_weight: float | None = None
    """Weight of the divergence from the target's law."""
    feature_weight: float | None = None
    """Weight of the distance between its states and the target's."""
    top_weight: float | None = None
    """Weight of the cross-entropy over the target's ten most probable tokens."""
    mean_over: Literal["counted", "all"] = "counted"
    """A forward's loss is a mean over the positions that it counts, or 1/T over all positions of
    answers, as GRIFFIN's paper prints it: a forward in which few chains live then weighs less."""

    def validate(self) -> None:
        for name in ("token_weight", "feature_weight", "top_weight"):
            value = getattr(self, name)
            good = value is None or (math.isfinite(value) and value >= 0)
            require(good, f"--{name.replace('_', '-')} must be 0 or more, got {value}")


@dataclass(frozen=True, kw_only=True)
class DivergenceConfig(Configuration):
    """What the draft model is trained for."""

    objective: str = "kl"
    """sft, kl, rkl, jsd, hellinger, tvd, tvdpp or lk (see docs/distill.md)."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture; 0 is kl, 1 is rkl."""
    reading: Literal["exact", "sampled", "draws", "uniform"] = "exact"
    """tvdpp: how the expectation of its formula is read (see docs/distill.md)."""
    teacher_temperature: float = 1.0
    """Divides the teacher's log-probabilities."""
    tail: Literal["bucket", "renormalise", "floor"] = "bucket"
    """What lies outside the teacher's kept tokens: one cell, nothing, or a charge."""

    def validate(self) -> None:
        require(0 <= self.beta <= 1, f"--beta must lie between 0 and 1, got {self.beta}")
        require(
            0 < self.teacher_temperature < math.inf,
            f"--teacher-temperature must be above 0, got {self.teacher_temperature:g}; to learn "
            "the teacher's most probable tokens, collect greedily and use --objective sft",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Configuration):
    """What pretraining and distillation have in common."""

    training: ScheduleConfig = field(default_factory=ScheduleConfig)
    out: Path
    """Folder for the model; an interrupted run with the same --out continues."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the forward pass; auto is bfloat16 where this machine multiplies it faster than
    float32, in a resumed run what it was begun in. Weights are float32."""
    save_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Number format of the saved model."""
    seed: int = 0
    """Keys the first weights, the order of the data and all draws."""
    save_every: int = 200
    """Steps between checkpoints."""
    eval_every: int = 0
    """Steps between evaluations on part of the held-out text; 0: only at the end."""
    report_to: str = "none"
    """Where figures go beside stderr: tensorboard, wandb, trackio, ... or several by comma."""

    def validate(self) -> None:
        super().validate()
        each_at_least(1, self, "save_every")
        each_at_least(0, self, "eval_every")
        check_seed(self.seed, "--seed")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(RunConfig):
    """A pretraining: the text, the model and the training."""

    data: TextConfig
    model: ArchitectureConfig = field(default_factory=ArchitectureConfig)

    def validate(self) -> None:
        super().validate()
        context, longest = self.model.context, self.training.longest
        require(
            context is None or context >= longest,
            f"--context {context} is less than a block: --block-length and --long-block-length "
            f"are up to {longest} tokens",
        )
        tokens = self.training.batch_tokens
        require(
            tokens >= longest,
            f"--batch-tokens {tokens} is less than a block: --block-length and --long-block-length "
            f"are up to {longest} tokens",
        )


@dataclass(frozen=True, kw_only=True)
class DistillConfig(RunConfig):
    """A distillation: the target, the drafter, the data, the objective and the training."""

    target: str
    """Folder or hub id of the target: its tokenizer, and its logprobs with --laws teacher."""
    drafter: str
    """A draft model to start from (folder or hub id), or a kind of drafter over hidden states:
    eagle, eagle3, hass, fspad, griffin, unrolled, medusa, p_eagle, parallel, or one of these with
    a folder, KIND:FOLDER."""
    drafter_option: Many = ()
    """An option of that drafter, as KEY=VALUE."""
    store: tuple[Path, ...] = ()
    """Stores that `draftsmith collect` wrote."""
    online: bool = False
    """Let the target continue --prompts while training, anew for every step."""
    prompts: Path | None = None
    """With --online: JSONL or one per line, also .gz and .xz."""
    bad_prompts: BadPromptConfig = field(default_factory=BadPromptConfig)
    on_policy: float = 0.0
    """With --online: the share of prompts that the draft model continues itself."""
    prompts_per_step: int = 8
    """With --online: prompts per optimiser step."""
    beams: int | None = None
    """With --online: beams of the target per prompt (left out: one sample); with --store: use only
    the best so many trajectories of each prompt."""
    max_new_tokens: int = 128
    """With --online: longest continuation."""
    laws: Literal["store", "states", "teacher"] = "store"
    """Logprobs as stored, or full ones: made of stored hidden states by the target's head, or by
    the target, which is then loaded (--online: always)."""
    top_k: int = 0
    """With full logprobs: learn the k most probable tokens only, as a store keeps them; 0: all.
    Held-out texts are measured with all."""
    fitting: FittingConfig = field(default_factory=FittingConfig)
    objective: DivergenceConfig = field(default_factory=lambda: DivergenceConfig())
    imitation: ImitationConfig = field(default_factory=lambda: ImitationConfig())
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
    text_logprobs: bool = False
    """With --text and the target loaded: learn its logprobs of the text, too, not the tokens.
    Drafters over hidden states always do."""
    hold_out: float = 0.05
    """Share of prompts, by a hash of their tokens, on which acceptance is measured."""
    evaluate: tuple[Path, ...] = ()
    """Stores on whose texts acceptance is measured and the best weights are chosen, in place of
    held-out prompts of --store; collect them from prompts that the target has not learnt either."""
    training: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
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
    eval_every: int = 100
    """Steps between measurements of held-out acceptance; the best weights are kept."""

    @property
    def loads_target(self) -> bool:
        """Whether the target is in memory, beside what is trained."""
        return self.online or self.laws == "teacher"

    @property
    def reads_logprobs(self) -> bool:
        """Whether logprobs are learnt as a store holds them."""
        return not self.online and self.laws == "store"

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
            each_unused("--online", self.bad_prompts, "on_bad_prompt")
            each_unused("--online", self, "on_policy", "prompts_per_step", "max_new_tokens")
        check_options(self.drafter_option)
        if not self.text:
            each_unused("--text", self, "text_share", "text_logprobs")
        if not self.loads_target:
            each_unused("--laws teacher or --online", self, "text_logprobs")
        if self.reads_logprobs:
            needs = "--laws states, --laws teacher or --online (`collect` has a --top-k of its own)"
            each_unused(needs, self, "top_k")
        each_at_least(0, self, "top_k")
        require(
            self.laws != "states" or not self.online,
            "--laws states is for a --store: leave it out with --online",
        )
        if self.beam_weights == "uniform":
            each_unused("--beam-weights score", self, "score_temperature")
        require(0 <= self.on_policy <= 1, "--on-policy is a share between 0 and 1")
        if self.online:
            each_unused("--store", self, "evaluate")
        require(
            not self.evaluate or self.hold_out == DistillConfig.hold_out,
            "--evaluate takes the place of held-out prompts: leave --hold-out out",
        )
        require(0 <= self.hold_out < 1, "--hold-out must be at least 0 and less than 1")
        require(0 < self.text_share < 1, "--text-share must lie between 0 and 1")
        require(self.score_temperature > 0, "--score-temperature must be above 0")
        mixture = self.aggregate == "mixture"
        require(
            not mixture or self.reads_logprobs,
            "--aggregate mixture takes the logprobs of a store: leave out --online and --laws",
        )
        each_at_least(1, self, "prompts_per_step", "beams", "max_new_tokens")
        require(
            self.training.long_block_length is None,
            "--long-block-length is for `pretrain`: trajectories are not cut",
        )


def check_continuation(wanted: CollectConfig | CollectSettings) -> None:
    """Raise InputError for a value out of its range, by the name of its flag."""
    each_at_least(1, wanted, "samples", most=_MOST_SAMPLES)
    if wanted.beams != "auto":
        each_at_least(1, wanted, "beams", most=_MOST_BEAMS)
    each_at_least(1, wanted, "max_beams", most=_MOST_BEAMS)
    each_at_least(1, wanted, "max_new_tokens")
    require(0 < wanted.top_p <= 1, f"--top-p must be above 0 and at most 1, got {wanted.top_p}")
    require(wanted.mass_gain > 0, f"--mass-gain must be above 0, got {wanted.mass_gain}")
    good = abs(wanted.length_penalty) <= 10  # lengths to that power are numbers
    wrong = f"--length-penalty must lie between -10 and 10, got {wanted.length_penalty}"
    require(good, wrong)


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Configuration):
    """A collection: which prompts, how they are continued, what is kept of the target's laws."""

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
        self.sample_temperatures()
        if self.samples is None:
            each_unused("--samples", self, "temperatures", "top_p")
        if self.beams is None:
            each_unused("--beams", self, "length_penalty")
        if self.beams != "auto":
            each_unused("--beams auto", self, "max_beams", "mass_gain")
        if self.scale.backend == "vllm":  # it batches and chooses kernels by itself
            each_unused("--backend transformers", self, "batch_size")
            names = ("device", "attn_implementation", "fixed_width")
            each_unused("--backend transformers", self.model, *names)
        each_at_least(1, self, "limit", "batch_size")
        check_continuation(self)
        check_seed(self.seed, "--seed")
        require(all(self.system), "--system must not be empty")

    def sample_temperatures(self) -> tuple[float, ...]:
        return parse_temperatures(self.temperatures, "--temperatures")
