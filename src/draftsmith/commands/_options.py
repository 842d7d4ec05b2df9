"""Groups of options that verbs share or nest, each with its own checks. See `options`.

The options of drafting and verification, with their checks. See `options`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from draftsmith.config import Form, Repeated, parse_bytes, parse_list
from draftsmith.core.config import TreeText, parse_tree
from draftsmith.drafters.names import drafter_parts
from draftsmith.errors import InputError

Many = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, Repeated]
"""A flag that may be given several times, one value each."""

Range = Annotated[str, Form(r"[0-9]+\.\.[0-9]+")]
"""A..B: whole numbers, both ends included."""

Size = Literal["tiny", "1m", "8m", "30m", "50m"]
"""Presets of `pretrain`; see `distill/model_sizes.py`."""


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that belong together."""

    def validate(self) -> None:
        """Raise `InputError` for values that cannot be used; nested groups check themselves."""
        for f in dataclasses.fields(self):
            group = getattr(self, f.name)
            if isinstance(group, OptionGroup):
                group.validate()


@dataclass(frozen=True, kw_only=True)
class VerbOptions(OptionGroup):
    """What every verb takes."""

    json: bool = False
    """Print one JSON object on stdout; everything else goes to stderr."""
    debug: bool = False
    """Show the full trace of an unexpected error."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The target: the model whose output law is preserved."""

    target: str
    """Folder or hub id of a decoder-only transformers model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Number format of weights and arithmetic; auto takes the checkpoint's own."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """The attention kernel."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that a hub model brings along: only if you have read that code."""

    def validate(self) -> None:
        require(bool(self.target.strip()), "--target must name a folder or a hub id, got ''")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(OptionGroup):
    """What turns logits into the law that is drawn from, beside the temperature."""

    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one."""
    repetition_penalty: float = 1.0
    """Divide (multiply, if negative) the logits of tokens that occurred; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every generated token."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it was generated."""
    logit_bias: str = ""
    """Added to logits: TOKEN_ID:BIAS pairs, such as 17:-5,42:1.5."""
    seed: int = 0
    """Seed of all draws; the same seed gives the same text."""

    def biases(self) -> dict[int, float]:
        """`logit_bias`, parsed."""
        biases: dict[int, float] = {}
        for pair in (
            parse_list(self.logit_bias, str, name="--logit-bias") if self.logit_bias else ()
        ):
            token, _, bias = pair.partition(":")
            try:
                biases[int(token)] = float(bias)
            except ValueError:
                hint = "expected TOKEN_ID:BIAS pairs such as 17:-5,42:1.5"
                raise InputError(f"--logit-bias: {hint}, got {pair!r}") from None
        return biases

    def validate(self) -> None:
        require(self.top_k >= 0, f"--top-k must be 0 (off) or more, got {self.top_k}")
        require(0 < self.top_p <= 1, f"--top-p must be above 0 and at most 1, got {self.top_p}")
        require(0 <= self.min_p <= 1, f"--min-p must lie between 0 and 1, got {self.min_p}")
        penalty = self.repetition_penalty
        good = math.isfinite(penalty) and penalty > 0
        require(good, f"--repetition-penalty must be above 0, got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            flag = f"--{name.replace('_', '-')}"
            require(math.isfinite(value), f"{flag} must be a finite number, got {value}")
        for token, bias in self.biases().items():
            require(token >= 0, f"--logit-bias: a token id is 0 or more, got {token}")
            # -inf forbids a token; +inf and NaN have no law.
            good = math.isfinite(bias) or bias == -math.inf
            require(good, f"--logit-bias: the bias of token {token} cannot be {bias}")
        good = 0 <= self.seed < 2**63
        require(good, f"--seed must be a whole number of 0 or more, got {self.seed}")


def check_temperature(value: float) -> None:
    """Raise `InputError` unless `value` is a usable temperature."""
    good = math.isfinite(value) and value >= 0
    require(good, f"--temperature must be 0 (greedy) or a positive number, got {value}")


def require(good: bool, sentence: str) -> None:
    if not good:
        raise InputError(sentence)


def unused(flag: str, value: object, default: object, needs: str) -> None:
    """Raise `InputError` for an option that was given and would do nothing."""
    require(value == default, f"{flag} does nothing without {needs}")


def at_least(least: int, flag: str, value: int | None) -> None:
    good = value is None or value >= least
    require(good, f"{flag} must be at least {least}, got {value}")


def each_at_least(least: int, options: OptionGroup, *names: str) -> None:
    """Of these fields."""
    for name in names:
        at_least(least, f"--{name.replace('_', '-')}", getattr(options, name))


@dataclass(frozen=True, kw_only=True)
class TextOptions(OptionGroup):
    """What is learnt from, and what is held out."""

    text: tuple[str, ...]
    """Files, folders or glob patterns: plain text (a file is a document), JSONL with a field
    `text` (a line is one), also .gz and .xz. python:stdlib is the folder of Python's sources."""
    include: tuple[str, ...] = ("*",)
    """Names to take from folders, relative to the folder: patterns such as *.py."""
    exclude: tuple[str, ...] = ()
    """Names to leave out of folders."""
    eval_text: tuple[str, ...] = ()
    """Held-out files, read like --text."""
    hold_out: float = 0.0
    """Without --eval-text: the share of files to hold out, chosen by a hash of their names."""
    attend_across_documents: bool = True
    """Tokens of a packed block may look at the documents before their own."""

    def validate(self) -> None:
        require(bool(self.text), "--text must name at least one file or folder")
        require(0 <= self.hold_out < 1, "--hold-out must be at least 0 and less than 1")


@dataclass(frozen=True, kw_only=True)
class ArchitectureOptions(OptionGroup):
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
        names = "layers heads kv_heads hidden intermediate context vocab_subset".split()
        each_at_least(1, self, *names)
        init = self.init
        require(
            init == "random" or (init.startswith("subclone:") and init != "subclone:"),
            f"--init must be random or subclone:TARGET, got {init!r}",
        )
        whole = self.vocab_subset is None or self.tokenizer is not None
        require(whole, "--vocab-subset needs --tokenizer")
        at_least(300, "--vocab-size", self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
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
    """A DeepSpeed configuration file (JSON). Batch sizes and clipping that it leaves out or calls
    "auto" follow from the options here; one that contradicts them is refused."""

    def validate(self) -> None:
        each_at_least(2, self, "block_length", "long_block_length")
        require(0 < self.long_share <= 1, "--long-share must be above 0 and at most 1")
        rates = (self.min_learning_rate, self.learning_rate, self.weight_decay)
        require(all(math.isfinite(rate) and rate >= 0 for rate in rates), "rates must be 0 or more")
        good = all(0 <= beta < 1 for beta in self.betas)
        require(good, f"--betas must be at least 0 and below 1, got {self.betas}")
        each_at_least(1, self, "gradient_accumulation", "batch_tokens")
        at_least(0, "--warmup", self.warmup)


@dataclass(frozen=True, kw_only=True)
class BadPromptOptions(OptionGroup):
    """What becomes of prompts of a file that cannot be used."""

    on_bad_prompt: Literal["skip", "error"] = "skip"
    """Prompts that are empty, over-long or otherwise of no use: count and leave out, or stop."""


@dataclass(frozen=True, kw_only=True)
class KeptOptions(OptionGroup):
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
        at_least(0, "--top-k", self.top_k)
        self.feature_words()


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(OptionGroup):
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
            unused("--workers", self.workers, 2, "--ray")
        at_least(1, "--shard-size", self.shard_size)
        at_least(1, "--workers", self.workers)
        self.most_bytes()


@dataclass(frozen=True, kw_only=True)
class FittingOptions(OptionGroup):
    """Which texts of a store are learnt from, and how they are put into blocks."""

    on_bad_shard: Literal["stop", "skip"] = "stop"
    """A damaged shard of a store: stop, or say it and learn from the others."""
    long_texts: Literal["cut", "drop"] = "cut"
    """A text that is longer than --block-length loses its end, or is left out."""
    one_per_block: bool = False
    """A block is one text and padding, in place of as many texts as fit."""

    def refuse(self) -> None:
        """Raise `InputError` where one is given, and no store."""
        unused("--on-bad-shard", self.on_bad_shard, "stop", "--store")
        unused("--long-texts", self.long_texts, "cut", "--store")
        unused("--one-per-block", self.one_per_block, False, "--store")


@dataclass(frozen=True, kw_only=True)
class ImitationOptions(OptionGroup):
    """What a drafter over hidden states learns beside the divergence; left out: as published."""

    token_weight: float | None = None
    """Of the divergence from the target's law."""
    feature_weight: float | None = None
    """Of the distance between its states and the target's."""
    top_weight: float | None = None
    """Of the cross-entropy over the target's ten most probable tokens."""

    def validate(self) -> None:
        for name in ("token_weight", "feature_weight", "top_weight"):
            value = getattr(self, name)
            good = value is None or (math.isfinite(value) and value >= 0)
            require(good, f"--{name.replace('_', '-')} must be 0 or more, got {value}")


@dataclass(frozen=True, kw_only=True)
class DivergenceOptions(OptionGroup):
    """What the draft model is trained for."""

    objective: str = "kl"
    """sft, kl, rkl, jsd, hellinger, tvd, tvdpp or lk (see docs/distill.md)."""
    beta: float = 0.5
    """jsd: weight of the teacher in the mixture; 0 is kl, 1 is rkl."""
    reading: Literal["exact", "sampled", "uniform"] = "exact"
    """tvdpp: how the expectation of its formula is read."""
    teacher_temperature: float = 1.0
    """Divides the teacher's log-probabilities."""
    tail: Literal["bucket", "renormalise", "floor"] = "bucket"
    """What lies outside the teacher's kept tokens: one cell, nothing, or a charge."""

    def validate(self) -> None:
        require(0 <= self.beta <= 1, f"--beta must lie between 0 and 1, got {self.beta}")
        value = self.teacher_temperature
        good = math.isfinite(value) and value > 0
        require(good, f"--teacher-temperature must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(OptionGroup):
    """What is drafted and how it is verified; left out, the drafter's own defaults hold."""

    draft_length: int | Literal["adaptive", "auto"] | Range | None = None
    """Tokens drafted per step; adaptive: more after drafts that were accepted whole; auto: what
    brings most by measured costs and recent acceptance, also nothing. 1..9: all of these, with
    `bench --perplexity`."""
    draft_tree: str | None = None
    """A tree instead of a chain: children per node at each depth, such as 4,2,2,1; or 10x6:59, ten
    beams six deep and the 59 most probable of their nodes; or a JSON file with a list of paths."""
    draft_proposal: Literal["sampled", "greedy", "without_replacement"] | None = None
    """How a draft model chooses children: draws, its top tokens, or draws without replacement."""
    rule: Literal["auto", "match", "rejection"] = "auto"
    """Verification; auto takes the one that accepts more of this drafter's proposals."""
    acceptance: Literal["exact", "typical"] = "exact"
    """typical is LOSSY: drafts stay that the target does not find unlikely (Medusa), and the output
    law is not the target's."""
    drafter_option: Many = ()
    """An option of the drafter itself, KEY=VALUE (with several drafters: KIND.KEY=VALUE)."""

    def tree(self) -> TreeText | None:
        """The draft's shape, or None when neither a tree nor a length was asked."""
        if self.draft_tree is not None:
            return parse_tree(self.draft_tree)
        length = self.draft_length
        return TreeText(widths=(1,) * length) if isinstance(length, int) else None

    def lengths(self) -> tuple[int, ...]:
        """Those that `draft_length` lists: a number or a range; none where it is a word."""
        first, dots, last = str(self.draft_length).partition("..")
        if isinstance(self.draft_length, int):
            return (self.draft_length,)
        return tuple(range(int(first), int(last) + 1)) if dots else ()

    def check_lengths(self) -> None:
        """For a measurement of acceptance: it counts chains of fixed lengths, verified exactly."""
        words = self.draft_length is not None and not self.lengths()
        require(
            not words,
            f"--draft-length {self.draft_length}: --perplexity counts drafts of fixed lengths; "
            "give a whole number or a range such as 1..9",
        )
        require(self.draft_tree is None, "--draft-tree: --perplexity counts chains; leave it out")
        lossy = f"--acceptance {self.acceptance}: --perplexity counts what is verified exactly"
        require(not self.lossy, f"{lossy}; leave it out")

    def refuse_range(self) -> None:
        """For verbs that draft in one way."""
        require(
            ".." not in str(self.draft_length),
            f"--draft-length {self.draft_length}: a range is for `bench --perplexity`; give a "
            "whole number, adaptive or auto",
        )

    def assignments(self, drafter: str, *, alone: bool) -> tuple[str, ...]:
        """The KEY=VALUE texts meant for `drafter` (as --drafter has it), without the KIND."""
        kind, _ = drafter_parts(drafter)
        mine = []
        for text in self.drafter_option:
            key = text.partition("=")[0]
            if key.startswith(f"{kind}."):
                mine.append(text[len(kind) + 1 :])
            elif alone:
                mine.append(text)
        return tuple(mine)

    def check_assignments(self, drafters: tuple[str, ...]) -> None:
        """With several drafters every --drafter-option says which one it is for."""
        kinds = {drafter_parts(drafter)[0] for drafter in drafters}
        for text in self.drafter_option:
            if len(drafters) > 1 and text.partition(".")[0] not in kinds:
                raise InputError(
                    f"--drafter-option {text!r}: say which drafter it is for, as KIND.KEY=VALUE "
                    f"with KIND one of {', '.join(sorted(kinds))}"
                )

    @property
    def lossy(self) -> bool:
        """The output law is not the target's."""
        return self.acceptance != "exact"

    @property
    def used_rule(self) -> str:
        """The rule to verify by."""
        return self.acceptance if self.lossy else self.rule

    def validate(self) -> None:
        alone = self.rule == "auto" or not self.lossy
        require(alone, f"--acceptance {self.acceptance} is a rule of its own: leave out --rule")
        length = self.draft_length
        if isinstance(length, int):
            require(length >= 1, f"--draft-length must be at least 1, got {length}")
        elif ".." in str(length):
            good = min(self.lengths(), default=0) >= 1
            require(good, f"--draft-length must be a range upwards from 1 or more, got {length}")
        if self.draft_tree is not None:
            require(length is None, "--draft-length and --draft-tree exclude each other: give one")
            drawn = self.draft_proposal not in (None, "greedy")
            require(
                parse_tree(self.draft_tree).keep is None or not drawn,
                f"--draft-tree {self.draft_tree} grows from the most probable tokens, where "
                f"--draft-proposal {self.draft_proposal} does nothing: leave it out, or give a "
                "tree of fixed shape, such as 4,2,1",
            )
        for text in self.drafter_option:
            key, equals, _ = text.partition("=")
            good = bool(equals and key.strip())
            require(good, f"--drafter-option must be KEY=VALUE, got {text!r}")
