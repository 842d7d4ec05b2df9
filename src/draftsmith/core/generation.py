"""Prompts in, texts and statistics out: `Generator`, and `generate` for token ids.

Both consume the decoding loop. `Detokenizer` and `pieces` turn tokens into text with the origin of
each piece.
"""

from __future__ import annotations

import collections.abc
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from numbers import Integral
from types import MappingProxyType
from typing import Any

from draftsmith.config import at_least, check_whole, is_whole, require, require_kind, short
from draftsmith.core.config import SamplingParams
from draftsmith.core.decode import DecodeOptions, Session, check_target, decode
from draftsmith.core.rows import StopStrings, check_prompt, several
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DecodeStep, LengthPolicy, TreeShape
from draftsmith.core.verify import Rule
from draftsmith.data.prompts import Message, Prompt, has_chat_template, text_prompt
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.errors import InputError
from draftsmith.targets.base import BindableTarget, Target
from draftsmith.targets.config import Attention, Dtype, ModelConfig, Weights
from draftsmith.targets.hf import open_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A drafter, bound to the target, and the shape of its drafts."""

    name: str
    """As the user spelt it."""
    drafter: Drafter
    shape: TreeShape | None = None
    """None: the drafter's own default."""
    policy: LengthPolicy | None = None

    @property
    def used_shape(self) -> TreeShape:
        return self.drafter.default_shape if self.shape is None else self.shape

    def adapt(self, options: DecodeOptions) -> DecodeOptions:
        """Return the options with this arm's draft."""
        return replace(options, shape=self.shape, policy=self.policy)


@dataclass(slots=True)
class DraftCounts:
    """Counts of one text (or, added up, of many). Only emitted tokens count."""

    steps: int = 0
    """Target forwards, the one that carries the prompt included (it emits and verifies too)."""
    emitted: int = 0
    accepted: int = 0
    offered: int = 0
    """Sum over steps of the depth offered on the best path."""
    proposed: int = 0
    """Candidate nodes in all trees."""
    by_position: list[tuple[int, int]] = field(default_factory=list)
    """Per depth: (times offered with all its predecessors accepted, times accepted)."""
    by_origin: dict[int, int] = field(default_factory=dict)
    """Accepted tokens per origin of the draft."""
    sources: tuple[str, ...] = ()
    """`Drafter.sources`: the name of the source behind each origin; empty: there is one source."""

    def add_step(self, step: DecodeStep, row: int) -> None:
        if not step.active[row]:
            return
        accepted, offered = step.accepted[row], step.offered_depth[row]
        self.steps += 1
        self.emitted += len(step.emitted[row])
        self.accepted += accepted
        self.offered += offered
        self.proposed += step.proposed[row]
        for depth in range(min(accepted + 1, offered)):
            if depth == len(self.by_position):
                self.by_position.append((0, 0))
            tried, took = self.by_position[depth]
            self.by_position[depth] = (tried + 1, took + (depth < accepted))
        for origin in step.origins[row]:
            self.by_origin[origin] = self.by_origin.get(origin, 0) + 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        positions = [
            (tried + also_tried, took + also_took)
            for (tried, took), (also_tried, also_took) in zip_longest(
                self.by_position, other.by_position, fillvalue=(0, 0)
            )
        ]
        origins = Counter(self.by_origin) + Counter(other.by_origin)
        return DraftCounts(
            steps=self.steps + other.steps,
            emitted=self.emitted + other.emitted,
            accepted=self.accepted + other.accepted,
            offered=self.offered + other.offered,
            proposed=self.proposed + other.proposed,
            by_position=positions,
            by_origin=dict(sorted(origins.items())),
            sources=self.sources or other.sources,
        )

    @property
    def by_source(self) -> dict[str, int]:
        """Accepted tokens per source, of a drafter that joins several; else empty."""
        counts = dict.fromkeys(self.sources, 0)
        for origin, count in self.by_origin.items() if counts else ():
            counts[self.sources[origin]] += count
        return counts

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency tau: emitted tokens per target forward."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length, as vLLM and EAGLE report it: another name of tokens per step."""
        return self.tokens_per_step

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens / depth offered on the best path; None when nothing was offered."""
        return self.accepted / self.offered if self.offered else None

    @property
    def node_acceptance_rate(self) -> float | None:
        """Accepted nodes / nodes proposed; equal to `acceptance_rate` for chains."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Conditional rates: accepted at depth d given that d was offered behind accepted ones."""
        return [took / tried for tried, took in self.by_position]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One continued prompt."""

    prompt_tokens: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated ones only, an end token included."""
    text: str | None
    """Decoded without special tokens and cut before a stop string; None without a tokenizer."""
    finish_reason: str
    """`stop`, `length` or `context`."""
    metrics: DraftCounts
    accepted_mask: tuple[bool, ...]
    """Per generated token: it was drafted (else it is the target's own)."""
    sources: tuple[str | None, ...] = ()
    """Per generated token, of a drafter that joins several: the name of the one that drafted it;
    None: it is the target's own. Empty: the drafter is one source."""


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    options: DecodeOptions,
    *,
    batch_size: int = 1,
    predictions: Sequence[Sequence[int]] = (),
    on_step: Callable[[DecodeStep, range], None] | None = None,
    on_done: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Continue all prompts, `batch_size` at a time, in their order.

    A prompt's request id is its number, so its text does not depend on the batch size.

    Args:
        on_step: called with every step and the prompt numbers of its rows (to stream).
        on_done: called with each prompt's number and its continuation when its batch is done.

    Raises:
        InputError: see `decode`; or a batch size below 1.
    """
    check_target(target)
    require_kind("options", options, DecodeOptions)
    at_least(1, "batch_size", batch_size)
    for name, call in (("on_step", on_step), ("on_done", on_done)):
        require(call is None or callable(call), f"{name} must be a function, got {short(call)}")
    prompts, predictions = several(prompts, "prompts"), several(predictions, "predictions")
    if predictions and len(predictions) != len(prompts):
        raise InputError(f"{len(prompts)} prompts need as many predictions, not {len(predictions)}")
    stops = StopStrings(options.stop_strings, target.tokenizer)
    results: list[Generation] = []
    for start in range(0, len(prompts), batch_size):
        numbers = range(start, min(start + batch_size, len(prompts)))
        batch = [prompts[i] for i in numbers]
        tokens: list[list[int]] = [[] for _ in batch]
        drafted: list[list[bool]] = [[] for _ in batch]
        named: list[list[str | None]] = [[] for _ in batch]
        counts = [DraftCounts(sources=drafter.sources) for _ in batch]
        finish = ["length"] * len(batch)
        for step in decode(
            target,
            drafter,
            batch,
            options,
            request_ids=numbers,
            predictions=[predictions[i] for i in numbers] if predictions else (),
        ):
            for b in range(len(batch)):
                new, accepted = step.emitted[b], step.accepted[b]
                tokens[b].extend(new)
                drafted[b].extend([True] * accepted + [False] * (len(new) - accepted))
                if drafter.sources:
                    named[b] += [drafter.sources[origin] for origin in step.origins[b]]
                    named[b] += [None] * (len(new) - accepted)
                counts[b].add_step(step, b)
                finish[b] = step.finish[b] or finish[b]
            if on_step is not None:
                on_step(step, numbers)
        for b, prompt in enumerate(batch):
            text = None
            if target.tokenizer is not None:
                text = stops.cut(target.tokenizer.decode(tokens[b], skip_special_tokens=True))
            made = Generation(
                prompt_tokens=tuple(map(int, prompt)),
                token_ids=tuple(tokens[b]),
                text=text,
                finish_reason=finish[b],
                metrics=counts[b],
                accepted_mask=tuple(drafted[b]),
                sources=tuple(named[b]),
            )
            results.append(made)
            if on_done is not None:
                on_done(numbers[b], made)
    return results


def encode(prompt: Prompt, target: Target, answers: Sequence[str] = ()) -> tuple[int, ...]:
    """The prompt as the target's tokens.

    Raises:
        InputError: it comes to no token at all, fills the context, or another tokenizer made it.
    """
    label = f"prompt {prompt.id}"
    if target.tokenizer is None:
        raise InputError(f"{label}: {target.name} has no tokenizer to read text with.")
    ids = prompt.token_ids(target.tokenizer, answers)
    check_prompt(ids, label, target.name, target.vocab_size, target.max_length)
    return ids


def prediction(prompt: Prompt, target: Target, turn: int = 0) -> tuple[int, ...]:
    """The prompt's reference for this turn as tokens; empty where there is none."""
    expected = prompt.expected(turn)
    if not expected or target.tokenizer is None:
        return ()
    return tuple(target.tokenizer.encode(expected[0], add_special_tokens=False))


Chat = Sequence[Mapping[str, str]]
"""Messages with the fields `role` and `content`, the last one to be answered."""
PromptInput = str | Sequence[int] | Chat

Steps = collections.abc.Generator[DecodeStep, None, None]
"""What `decode` gives; closing it ends the decoding."""

_BOUND_BY: weakref.WeakKeyDictionary[Drafter, weakref.ref[Generator]] = weakref.WeakKeyDictionary()
"""The generator that bound a drafter last."""


class Generator:
    """A target and its drafter, ready to continue prompts.

        generator = Generator("Qwen/Qwen3-0.6B", drafter="prompt_lookup")
        (output,) = generator.generate("The capital of France is", SamplingParams(max_tokens=32))
        output.text, output.token_ids, output.finish_reason, output.metrics.acceptance_length

    Args:
        target: folder or hub id of a model, `KIND:SOURCE` of an installed kind of target, or a
            target that is loaded.
        drafter: what `--drafter` takes (`none`, `prompt_lookup`, `griffin:PATH`, a folder), or a
            drafter; it is bound to the target here, and again when another generator had it since.
        drafter_options: fields of the drafter's `Config`, where `drafter` is a name.
        shape: the draft's shape, such as `TreeShape.chain(4)`; None: the drafter's default.
        policy: chooses the draft length per row and step; None: always the shape's.
        rule: `auto`, `match`, `rejection`, `block`, `traversal`, a lossy or installed one, or a
            `Rule`.
        allow_lossy: leave to use a rule that changes the output distribution.
        dtype: as for `load_target`, like those below; only where `target` is a name.
        device: where the model runs.
        attn_implementation: transformers' implementation of attention.
        weights: format that a CPU computes in, see `ModelConfig`.
        compile: run models of the Llama family on a CPU in C++.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run code that comes with the model.

    Raises:
        InputError: an unknown drafter, or options of a target or drafter that is loaded already.
        BackendError: the target or the drafter's weights cannot be read.
        UnsupportedModel: the target cannot be decoded exactly.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | BindableTarget,
        drafter: str | os.PathLike[str] | Drafter = "none",
        *,
        drafter_options: Mapping[str, object] = MappingProxyType({}),
        shape: TreeShape | None = None,
        policy: LengthPolicy | None = None,
        rule: str | Rule = "auto",
        allow_lossy: bool = False,
        dtype: Dtype = "auto",
        device: str = "auto",
        attn_implementation: Attention = "sdpa",
        weights: Weights = "auto",
        compile: bool = True,
        revision: str | None = None,
        fixed_width: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        model = ModelConfig(
            target=os.fspath(target) if isinstance(target, (str, os.PathLike)) else "",
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            weights=weights,
            compile=compile,
            revision=revision,
            fixed_width=fixed_width,
            trust_remote_code=trust_remote_code,
        )
        if isinstance(target, (str, os.PathLike)):
            target = open_target(model)
        else:
            check_target(target)
            require(
                model == ModelConfig(target=""),
                f"{target.name} is loaded already: give dtype, device, attn_implementation, "
                "weights, compile, revision, fixed_width and trust_remote_code to load_target.",
            )
        require_kind("drafter_options", drafter_options, Mapping, " of options to values")
        DecodeOptions(shape=shape, policy=policy, rule=rule, allow_lossy=allow_lossy)  # checks them
        if isinstance(drafter, (str, os.PathLike)):
            options = [f"{name}={value}" for name, value in drafter_options.items()]
            drafter = load_drafter(os.fspath(drafter), options)
        elif not isinstance(drafter, Drafter):
            raise InputError(f"drafter must be a name, a folder or a Drafter, got {drafter!r}.")
        elif drafter_options:
            raise InputError("drafter_options are for drafters by name: this one is made already.")
        self.target, self.drafter = target, drafter
        self._bind()
        self._shape, self._policy = shape, policy
        self._rule, self._allow_lossy = rule, allow_lossy

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        batch_size: int = 1,
        predictions: Sequence[str | Sequence[int]] = (),
        on_step: Callable[[DecodeStep, range], None] | None = None,
        on_done: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer or continue one prompt or several.

        Args:
            prompts: texts, chats or token ids. A chat goes through the tokenizer's chat template,
                and so does a text, as what the user says. Where the tokenizer has none, a text is
                continued.
            params: None: the defaults of `SamplingParams`.
            raw: texts are continued as they stand, without the chat template.
            batch_size: prompts decoded together; the texts do not depend on it.
            predictions: an expected continuation per prompt, for drafters that use one.
            on_step: called with every step and the prompt numbers of its rows (to stream).
            on_done: called with each prompt's number and its continuation when its batch is done.

        Returns:
            In the order of the prompts, the `params.n` continuations of each side by side.

        Raises:
            InputError: no prompt, one that is empty, or one that fills the target's context.
            LossyRule, UnsupportedProposal: see `draftsmith.core.verify.check_rule`.
        """
        params = SamplingParams() if params is None else params
        options = self.decode_options(params)
        require_kind("raw", raw, bool)
        self._bind()
        ids = [_prompt_tokens(one, i, self.target, raw) for i, one in enumerate(_as_list(prompts))]
        if isinstance(predictions, str):
            predictions = [predictions]
        predictions = several(predictions, "predictions")
        if self.target.tokenizer is None and any(isinstance(one, str) for one in predictions):
            raise InputError(f"{self.target.name} has no tokenizer: give predictions as token ids.")
        for number, one in enumerate(predictions):
            if isinstance(one, str):
                check_whole(one, f"prediction {number}")
        expected = [
            self.target.tokenizer.encode(one, add_special_tokens=False)
            if isinstance(one, str)
            else one
            for one in predictions
        ]
        return generate(
            self.target,
            self.drafter,
            [prompt for prompt in ids for _ in range(params.n)],
            options,
            batch_size=batch_size,
            predictions=[one for one in expected for _ in range(params.n)],
            on_step=on_step,
            on_done=on_done,
        )

    def steps(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        request_ids: Sequence[int] | None = None,
        session: Session | None = None,
    ) -> Steps:
        """Decode token ids side by side, one `DecodeStep` per target forward: see `decode`."""
        self._bind()
        return decode(
            self.target,
            self.drafter,
            prompts,
            self.decode_options(params),
            request_ids=request_ids,
            session=session,
        )

    def _bind(self) -> None:
        """Bind the drafter to the target, unless this generator was the last one to do so."""
        last = _BOUND_BY.get(self.drafter)
        if last is None or last() is not self:
            self.drafter.bind(self.target)
            _BOUND_BY[self.drafter] = weakref.ref(self)

    def decode_options(self, params: SamplingParams) -> DecodeOptions:
        """What `decode` receives for these parameters. Without a seed one is drawn.

        Raises:
            InputError: `max_tokens` is None and the target has no limit.
        """
        sampler = Sampler.from_params(params)  # checks what they are
        most = self.target.max_length if params.max_tokens is None else params.max_tokens
        if most is None:
            raise InputError(f"{self.target.name} has no limit of its own: give max_tokens.")
        return DecodeOptions(
            sampler=sampler,
            max_new_tokens=most,
            rule=self._rule,
            shape=self._shape,
            policy=self._policy,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_strings=params.stop_strings,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_end=params.ignore_eos,
            allow_lossy=self._allow_lossy,
        )


_BYTES = (bytes, bytearray, memoryview)
"""An undecoded text: its numbers are no token ids."""


def _as_list(prompts: Any) -> list[Any]:
    """The prompts as a list, also where one alone was given."""
    prompts = _plain(prompts)
    if isinstance(prompts, (str, *_BYTES, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    if not listed:
        raise InputError("There is no prompt to continue.")
    return [listed] if isinstance(listed[0], (Integral, Mapping)) else listed


def _plain(values: Any) -> Any:
    """Arrays and tensors as lists."""
    array = hasattr(values, "tolist") and not isinstance(values, _BYTES)
    return values.tolist() if array else values


def _prompt_tokens(prompt: Any, number: int, target: Target, raw: bool) -> Sequence[int]:
    """A text, a chat or token ids as token ids."""
    if isinstance(prompt, str):
        if not raw and not prompt.strip() and has_chat_template(target.tokenizer):
            raise InputError(f"Prompt {number} is empty: there is nothing to answer.")
        return encode(text_prompt(prompt, id=str(number), raw=raw), target)
    prompt = _plain(prompt)
    parts = (
        list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES) else None
    )
    if parts and all(isinstance(one, Mapping) for one in parts):
        if raw:
            raise InputError(
                f"Prompt {number} is a chat, which raw=True cannot continue as it stands: leave "
                "out raw, or give the chat as one text."
            )
        return encode(Prompt(id=str(number), messages=_messages(parts, number)), target)
    if parts is None or not all(is_whole(one) for one in parts):
        raise InputError(
            f"Prompt {number} is neither a text, nor token ids, nor a chat: a list of messages "
            "with `role` and `content`."
        )
    return [int(one) for one in parts]


def _messages(chat: Chat, number: int) -> tuple[Message, ...]:
    for message in chat:
        if message.keys() != {"role", "content"}:
            raise InputError(
                f"Prompt {number}: a message has the fields `role` and `content`, not "
                f"{', '.join(sorted(map(str, message)))}."
            )
        if not all(isinstance(text, str) for text in message.values()):
            raise InputError(f"Prompt {number}: `role` and `content` of a message are texts.")
    return tuple(Message(role=one["role"], content=one["content"]) for one in chat)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of text and where it came from."""

    text: str
    drafted: bool


class Detokenizer:
    """Tokens to text, a piece at a time; the pieces add up to the decoded whole.

    A token is not a piece of text of its own: a character may span several, and a leading blank
    depends on what stands before. So a short run is decoded with and without the new tokens:

        tokens   ... a b c | d            decode(a b c d) - decode(a b c) = the text of d
                     ^start ^read         held back while it ends inside a character
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = self._read = 0

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole."""
        self._tokens.append(token)
        return self._take(force=False)

    def finish(self) -> str:
        """What was held back."""
        return self._take(force=True)

    def _take(self, *, force: bool) -> str:
        before = self._decode(self._tokens[self._start : self._read])
        after = self._decode(self._tokens[self._start :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not force):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return after[len(before) :]


def pieces(tokenizer: Any, tokens: Sequence[int], drafted: Sequence[bool]) -> tuple[Piece, ...]:
    """The text of the tokens, in runs of one origin. A character belongs to its last token."""
    detokenizer = Detokenizer(tokenizer)
    runs: list[Piece] = []

    def add(text: str, origin: bool) -> None:
        if not text:
            return
        if runs and runs[-1].drafted == origin:
            text = runs.pop().text + text
        runs.append(Piece(text=text, drafted=origin))

    for token, origin in zip(tokens, drafted, strict=True):
        add(detokenizer.add(token), origin)
    add(detokenizer.finish(), bool(drafted[-1]) if len(drafted) else False)
    return tuple(runs)
