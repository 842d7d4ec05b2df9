"""Arms of a measurement: drafters, bound to a target, and timed runs of them.

Transformers' own `generate` is timed in the same manner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.bench.loops import StepCounts, count_outside, in_loops, steps_outside
from draftsmith.bench.records import PhaseSeconds
from draftsmith.config import require
from draftsmith.core.cache import Block, KVCache
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import Arm, DraftCounts, Generator
from draftsmith.core.rows import until_end
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import Recorder, no_garbage_collection
from draftsmith.core.types import DecodeStep, LengthPolicy, Signals, TargetOutput, TreeShape
from draftsmith.data.prompts import Prompt
from draftsmith.drafters.base import TRAINING, Drafter, options_marked
from draftsmith.drafters.config import DraftingConfig, drafter_parts
from draftsmith.drafters.registry import load_drafter, option_keys
from draftsmith.errors import InputError
from draftsmith.provenance import portable_text
from draftsmith.targets.base import BindableTarget, Target
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.native.engine import engine_of

SPLIT = ("draft", "target", "verify")
"""What the decoding loop gives its recorder; the rest of a run's seconds is `other`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRun:
    """The result of decoding one group of prompts once; one entry per row of the group."""

    tokens: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[bool, ...], ...]
    decode_tokens: tuple[int, ...]
    finish: tuple[str, ...]
    seconds: float
    prefill_seconds: float
    counts: tuple[DraftCounts, ...] | None = None
    """None for an engine that does not tell."""
    decode_steps: tuple[int, ...] | None = None
    outside_loops: tuple[StepCounts, ...] | None = None
    seconds_outside_loops: float | None = None
    """What the steps counted there took; None: several rows, which share their steps."""
    phases: PhaseSeconds | None = None
    widths: tuple[int, ...] = ()
    """Tokens per row that each step of the decoding phase fed."""

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds


class WidthMeter:
    """A target that records how many tokens per row each forward is fed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.widths: list[int] = []
        self.name, self.tokenizer = target.name, target.tokenizer
        self.vocab_size, self.end_ids = target.vocab_size, target.end_ids
        self.max_length = target.max_length
        self.device, self.dtype = target.device, target.dtype
        self.compiled = engine_of(target)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return self._target.new_cache(num_rows, capacity)

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        self.widths.append(tokens_BT.shape[1])
        return self._target.forward(tokens_BT, block, keep, signals)


def now(device: torch.device) -> float:
    """Wait for the device, then return the seconds of a steady clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def make_recorder(device: torch.device) -> Recorder:
    """Choose a recorder. That of a GPU waits for it at both ends: seconds fall where the work was
    ordered."""
    return Recorder(partial(now, device)) if device.type == "cuda" else Recorder()


def time_decode(
    target: Target,
    arm: Arm,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    request_ids: Sequence[int],
    predictions: Sequence[Sequence[int]] = (),
) -> TimedRun:
    """Decode the prompts with the arm's drafter; prefill and decoding timed apart."""
    meter = WidthMeter(target)
    recorder = make_recorder(target.device)
    steps: list[DecodeStep] = []
    ends: list[float] = []
    prefill_split: dict[str, float] = {}
    prefill_forwards = 0
    with no_garbage_collection():
        start = now(target.device)
        for step in decode(
            meter,
            arm.drafter,
            prompts,
            arm.adapt(options),
            request_ids=request_ids,
            predictions=predictions,
            recorder=recorder,
        ):
            ends.append(now(target.device))
            if not steps:
                prefill_split = recorder.snapshot()
                prefill_forwards = len(meter.widths)  # a long prompt takes several
            steps.append(step)
        end = now(target.device)
    prefill_end = ends[0] if ends else 0.0
    split = {name: recorder.seconds.get(name, 0.0) - prefill_split.get(name, 0.0) for name in SPLIT}
    rows = range(len(prompts))
    counts = tuple(DraftCounts(sources=arm.drafter.sources) for _ in rows)
    for step in steps:
        for b in rows:
            counts[b].add_step(step, b)
    finish = [[f for step in steps if (f := step.finish[b]) is not None] for b in rows]
    tokens = tuple(tuple(t for step in steps for t in step.emitted[b]) for b in rows)
    looped = [in_loops(text) for text in tokens]
    outside = steps_outside(steps, 0, looped[0]) if len(prompts) == 1 else None
    return TimedRun(
        tokens=tokens,
        drafted=tuple(
            tuple(n < step.accepted[b] for step in steps for n in range(len(step.emitted[b])))
            for b in rows
        ),
        decode_tokens=tuple(sum(len(step.emitted[b]) for step in steps[1:]) for b in rows),
        finish=tuple(found[0] if found else "length" for found in finish),
        seconds=end - start,
        prefill_seconds=prefill_end - start,
        counts=counts,
        decode_steps=tuple(sum(step.active[b] for step in steps[1:]) for b in rows),
        outside_loops=tuple(count_outside(steps, b, looped[b]) for b in rows),
        seconds_outside_loops=None
        if outside is None
        else sum(ends[at] - ends[at - 1] for at in outside),
        phases=PhaseSeconds(**split, other=max(end - prefill_end - sum(split.values()), 0.0)),
        widths=tuple(meter.widths[prefill_forwards:]),
    )


def supports(sampler: Sampler) -> bool:
    """Check whether transformers can draw from this law: it has no presence or frequency
    penalty."""
    return not (sampler.presence_penalty or sampler.frequency_penalty or sampler.logit_bias)


class _Clock:
    """A streamer that records when the first new tokens came (`put` gets the prompt first)."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._device, self._rows, self._calls = device, rows, 0
        self.first_time = 0.0
        self.first_tokens = 1
        """Per row: with drafts the prompt's step may give several."""

    def put(self, value: Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_time = now(self._device)
            self.first_tokens = value.numel() // self._rows

    def end(self) -> None:
        pass


def time_generate(
    target: HFTarget,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    max_new_tokens: int,
    seed: int,
    *,
    prompt_lookup: int = 0,
) -> TimedRun:
    """Continue the prompts by `model.generate`; prefill and decoding timed apart.

    `prompt_lookup`: length of transformers' own prompt-lookup drafts; 0: none.
    """
    ids_BT, mask_BT = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        for rows in ([torch.tensor(p) for p in prompts], [torch.ones(len(p)) for p in prompts])
    )
    config = _config(target, sampler, max_new_tokens, ids_BT.shape[1], prompt_lookup)
    clock = _Clock(target.device, len(prompts))
    devices = [target.device] if target.device.type == "cuda" else []
    seeded = torch.random.fork_rng(devices=devices)
    with seeded, target.native() as model, torch.inference_mode():
        torch.manual_seed(seed)
        with no_garbage_collection():
            start = now(target.device)
            out = model.generate(
                input_ids=ids_BT.to(target.device),
                attention_mask=mask_BT.long().to(target.device),
                generation_config=config,
                streamer=clock,
            )
            end = now(target.device)
    rows = [[int(t) for t in row[ids_BT.shape[1] :]] for row in out]
    tokens = [until_end(row, target.end_ids) for row in rows]
    ended = [bool(row) and row[-1] in target.end_ids for row in tokens]
    full = config.max_new_tokens == max_new_tokens
    return TimedRun(
        tokens=tuple(map(tuple, tokens)),
        drafted=tuple((False,) * len(row) for row in tokens),
        decode_tokens=tuple(max(len(row) - clock.first_tokens, 0) for row in tokens),
        finish=tuple("stop" if done else "length" if full else "context" for done in ended),
        seconds=end - start,
        prefill_seconds=clock.first_time - start if clock.first_time else 0.0,
    )


def _config(
    target: HFTarget, sampler: Sampler, max_new_tokens: int, longest: int, prompt_lookup: int
) -> Any:
    """Set every option, since transformers fills gaps from the model's own defaults."""
    from transformers import GenerationConfig

    room = max_new_tokens
    if target.max_length is not None:
        room = min(room, target.max_length - longest)
    warping: dict[str, float] = {}
    if sampler.temperature > 0:  # greedy, these would only be warned about
        warping = {"temperature": sampler.temperature, "top_k": sampler.top_k}
        warping |= {"top_p": sampler.top_p, "min_p": sampler.min_p}
    return GenerationConfig(
        max_new_tokens=room,
        do_sample=sampler.temperature > 0,
        **warping,
        repetition_penalty=sampler.repetition_penalty,
        eos_token_id=sorted(target.end_ids) or None,
        pad_token_id=min(target.end_ids, default=0),
        prompt_lookup_num_tokens=prompt_lookup or None,
    )


# --------------------------------------------------------------------------- drafters


def make_generator(target: BindableTarget, arm: Arm, options: DraftingConfig) -> Generator:
    """The target with this drafter, its shape and policy, and the rule of the options."""
    return Generator(
        target,
        arm.drafter,
        shape=arm.shape,
        policy=arm.policy,
        rule=options.used_rule,
        allow_lossy=options.is_lossy(),
    )


def open_drafters(
    names: Sequence[str], options: DraftingConfig, target: BindableTarget
) -> tuple[Arm, ...]:
    """Load and bind the drafters.

    Raises:
        InputError: an option that no drafter here can follow (one that some can is for those), an
            option of a drafter that only training reads or that a flag takes the place of, or a
            draft longer than the context.
    """
    alone = len(names) == 1
    shaping = options.draft_length is not None or options.draft_tree is not None
    unshaped: dict[str, str] = {}
    undrawn: dict[str, str] = {}
    out: list[Arm] = []
    for name in names:
        assignments = options.assignments(name, alone=alone)
        flag = "--draft-length" if options.draft_tree is None else "--draft-tree"
        own = options.own_length(name, alone=alone) if shaping else None
        require(own is None, f"--drafter-option {own} and {flag} exclude each other: give one")
        drafter = _load(name, assignments, options.draft_proposal)
        drafter.bind(target)
        label = portable_text(name)  # records name no folder outside the current one
        clash = any(arm.name == label for arm in out)
        reason = _unusable(name, drafter, options, alone=alone) if shaping else None
        if reason is not None:
            unshaped[name] = reason
        fitting = options
        if reason is not None:
            fitting = dataclasses.replace(options, draft_length=None, draft_tree=None)
        arm = _shaped(name if clash else label, drafter, fitting, target)
        reason = _undrawn(name, arm)
        if reason is not None and "proposal" in option_keys(assignments):
            raise InputError(f"{reason}.")
        if reason is not None and options.draft_proposal is not None:
            undrawn[name] = reason
        out.append(arm)
    for refused in (unshaped, undrawn):
        if len(refused) == len(names):
            others = [reason for name, reason in refused.items() if name != "none"]
            raise InputError("; ".join(others or refused.values()) + ".")
    return tuple(out)


def _load(name: str, assignments: Sequence[str], proposal: str | None) -> Drafter:
    drafter = load_drafter(name, assignments)
    trained = frozenset[str]().union(
        *(options_marked(part.config, TRAINING) for part in drafter.parts)
    )
    for key in option_keys(assignments):
        if key.rpartition(".")[2] in trained:
            raise InputError(
                f"--drafter-option {key}: {name} reads it when it is trained, not when it drafts; "
                "leave it out."
            )
    if proposal is None or proposal_of(drafter) is None:
        return drafter
    twice = "--drafter-option proposal and --draft-proposal exclude each other: give one"
    require("proposal" not in option_keys(assignments), twice)
    return load_drafter(name, [*assignments, f"proposal={proposal}"])


def proposal_of(drafter: Drafter) -> str | None:
    """Return how it chooses children; None: it knows one way only, as a draft model with another
    tokenizer, bound to its target, does."""
    return (
        None if getattr(drafter, "reads_text", False) else getattr(drafter.config, "proposal", None)
    )


def _undrawn(name: str, arm: Arm) -> str | None:
    """Say why a proposal that is asked for would do nothing; None: it works."""
    proposal = proposal_of(arm.drafter)
    if proposal is None:
        return (
            f"--draft-proposal does nothing for {name}, which drafts in one way only: leave it out"
        )
    if proposal == "greedy" or not arm.used_shape.is_dynamic:
        return None
    return (
        f"the tree of {name} grows from its most probable tokens, where the proposal {proposal} "
        "does nothing: leave it out, or give --draft-length or a --draft-tree of fixed shape, "
        "such as 4,2,1"
    )


def _unusable(name: str, drafter: Drafter, options: DraftingConfig, *, alone: bool) -> str | None:
    """Say why --draft-length or --draft-tree would do less than it says; None: it works."""
    shape = options.tree() or TreeShape()
    longest = drafter.longest
    flag = "--draft-length" if options.draft_tree is None else "--draft-tree"
    if longest == 0:
        return f"{name} drafts nothing: leave out {flag}, or choose another --drafter"
    if not (shape.is_chain or drafter.takes_trees):
        return f"{name} drafts chains, no trees: use --draft-length in place of --draft-tree"
    if longest is None or shape.depth <= longest:
        return None
    # is there an option of its own that allows as much?
    missing = shape.depth - longest
    for field in dataclasses.fields(drafter.config):
        value = getattr(drafter.config, field.name)
        if type(value) is int and field.name not in options_marked(drafter.config, TRAINING):
            with contextlib.suppress(InputError):  # some value that this option cannot have
                grown = dataclasses.replace(drafter.config, **{field.name: value + missing})
                if type(drafter)(grown).longest == shape.depth:
                    owner = "" if alone else f"{drafter_parts(name)[0]}."
                    hint = f"use --drafter-option {owner}{field.name}={value + missing}"
                    return f"{name} drafts at most {longest} tokens: {hint}"
    return f"{name} drafts at most {longest} tokens: {flag} must not be longer"


def _shaped(name: str, drafter: Drafter, options: DraftingConfig, target: Target) -> Arm:
    shape = options.tree()
    policy: LengthPolicy | None = None
    if options.draft_length == "auto":  # the policy comes when costs are known
        from draftsmith.plan.length_policy import LONGEST_AUTO

        longest = TreeShape.chain(min(LONGEST_AUTO, drafter.longest or LONGEST_AUTO))
        shape = longest if shape is None else shape
    elif options.draft_length == "adaptive":
        from draftsmith.plan.length_policy import AdaptiveLength

        policy = AdaptiveLength()
        if drafter.longest is not None and drafter.longest < policy.longest:
            first = min(policy.first, drafter.longest)
            policy = AdaptiveLength(first=first, longest=drafter.longest)
        shape = TreeShape.chain(policy.max_length)
    arm = Arm(name=name, drafter=drafter, shape=shape, policy=policy)
    nodes = arm.used_shape.num_nodes
    if target.max_length is not None and nodes >= target.max_length:
        raise InputError(
            f"A draft of {nodes} tokens does not fit into the context of {target.name}, which has "
            f"{target.max_length} positions: give a smaller --draft-length or --draft-tree."
        )
    return arm


def check_predictions(prompts: Sequence[Prompt], arms: Sequence[Arm]) -> None:
    """Raise `InputError` for a drafter that reads predictions where there are none."""
    for arm in arms:
        if arm.drafter.reads_predictions and not any(prompt.reference for prompt in prompts):
            raise InputError(
                f"--drafter {arm.name} drafts from the field `reference` of a prompt file, and no "
                "prompt here has one."
            )
