"""The state of one request in the decoding loop: its tokens, stop conditions and counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.config import check_whole, is_whole, require, short
from draftsmith.core.sampling import History
from draftsmith.core.types import LengthPolicy, RowStats, StepCount
from draftsmith.errors import InputError


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens (pieces, characters) two sequences share from their beginning."""
    different = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))


def until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first end token: nothing behind it can be emitted."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: i + 1]
    return tokens


class StopStrings:
    """Finds a stop string as soon as the token that completes it is there.

    Only a tail of the text is decoded: a string of n bytes spans at most n tokens, and a few more
    cover what a tokenizer does at the edge.

    Raises:
        InputError: a string that is empty or no whole text, or no tokenizer to find any with.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        if strings and tokenizer is None:
            raise InputError("Stop strings need a tokenizer, and this target has none.")
        if "" in strings:
            raise InputError("A stop string is empty: it would stop everywhere.")
        for text in strings:
            check_whole(text, "a stop string")
        self.strings, self._tokenizer = tuple(strings), tokenizer
        self._window = max((len(s.encode()) for s in strings), default=0) + 8

    def complete(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Whether the last token completes a stop string in the generated text."""
        if not self.strings:
            return False
        tail = tokens[max(num_prompt, len(tokens) - self._window) :]
        # with special tokens, which may be meant, and without, as the text will read
        for skip in (False, True):
            text = self._tokenizer.decode(tail, skip_special_tokens=skip)
            before = self._tokenizer.decode(tail[:-1], skip_special_tokens=skip)
            if any(s in text and s not in before for s in self.strings):
                return True
        return False

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        places = [text.find(s) for s in self.strings if s in text]
        return text[: min(places)] if places else text


_TRACKED = 32
"""Places deeper in a draft are not counted one by one."""
_BRIEF, _AGEING, _LONG = 10.0, 0.7, 64.0
"""For how many steps counts are remembered: at first, more per step, and at most."""
_BAD_LUCK = 2
"""So many drafts in a row may miss before what is remembered is doubted."""


def one_more(past: RowStats, step: StepCount) -> RowStats:
    """Add one step to the statistics of a row.

    Counts fade with every step, also with those that draft nothing: a row that has stopped
    drafting forgets why, and tries again. The memory grows with the row: after an early failure
    it tries again soon, after a long one seldom. Where drafts used to be accepted and miss
    repeatedly, the text has changed, and the counts lose up to half
    (`plan.length_policy` reads them).
    """
    if step.asked == 0:
        return rested(past, 1)
    offered, accepted = step.offered, step.accepted
    missed = offered > 0 and accepted == 0
    misses = past.misses + 1 if missed else past.misses if offered == 0 else 0
    fade = _fade(past.steps)
    if missed and misses > _BAD_LUCK and past.tried_D:
        fade *= 1.0 - 0.5 * (past.kept_D[0] / past.tried_D[0]) ** 2
    tried_D = [fade * count for count in past.tried_D]
    kept_D = [fade * count for count in past.kept_D]
    reached = min(accepted + 1, offered, _TRACKED)
    new = [0.0] * (reached - len(tried_D))
    tried_D += new
    kept_D += new
    for d in range(reached):
        tried_D[d] += 1.0
        kept_D[d] += d < accepted
    asked_on, ended, asked_on_kept, ended_kept = step.ends()
    return RowStats(
        steps=past.steps + 1,
        offered=past.offered + offered,
        accepted=past.accepted + accepted,
        last_offered=offered,
        last_accepted=accepted,
        misses=misses,
        idle=0 if missed else past.idle,
        asked=fade * past.asked + 1.0,
        found=fade * past.found + (offered > 0),
        asked_on=fade * past.asked_on + asked_on,
        ended=fade * past.ended + ended,
        asked_on_kept=fade * past.asked_on_kept + asked_on_kept,
        ended_kept=fade * past.ended_kept + ended_kept,
        tried_D=tuple(tried_D),
        kept_D=tuple(kept_D),
    )


def rested(past: RowStats, steps: int) -> RowStats:
    """Add so many steps that were not to draft, all at once."""
    fade = math.prod([_fade(past.steps + n) for n in range(steps)])
    return replace(
        past,
        steps=past.steps + steps,
        last_offered=0,
        last_accepted=0,
        idle=past.idle + steps,
        asked=fade * past.asked,
        found=fade * past.found,
        asked_on=fade * past.asked_on,
        ended=fade * past.ended,
        asked_on_kept=fade * past.asked_on_kept,
        ended_kept=fade * past.ended_kept,
        tried_D=tuple([fade * count for count in past.tried_D]),
        kept_D=tuple([fade * count for count in past.kept_D]),
    )


def _fade(steps: int) -> float:
    """How much the counts of a row keep that has taken so many steps."""
    return 1.0 - 1.0 / min(_BRIEF + _AGEING * steps, _LONG)


def counted(past: RowStats, steps: Iterable[StepCount]) -> RowStats:
    """Add these steps to the statistics of a row."""
    for drafts, some in itertools.groupby(steps, key=lambda step: step.asked > 0):
        if drafts:
            for step in some:
                past = one_more(past, step)
        else:
            past = rested(past, sum(1 for _ in some))
    return past


@dataclass(slots=True)
class Row:
    """One request on its way."""

    request_id: int
    tokens: list[int]
    """Prompt and generated tokens; the last one is the root."""
    num_prompt: int
    max_new_tokens: int
    max_length: int | None
    """Length of the target's context."""
    finish: str | None = None
    counts: list[StepCount] = field(default_factory=list)
    """One per step."""
    _stats: RowStats = field(default_factory=RowStats)
    asked: int = 0
    """How deep the step at hand may draft."""
    pause: int = 0
    """Steps that were not to draft, since one last was."""
    rests_until: int = 0
    """The policy is not asked before `pause` has come to this."""

    @property
    def room(self) -> int:
        """How many more tokens may be emitted."""
        left = self.max_new_tokens - (len(self.tokens) - self.num_prompt)
        if self.max_length is not None:
            left = min(left, self.max_length - len(self.tokens))
        return left

    @property
    def context_left(self) -> int:
        """How many positions the target has behind the root (a large number: no known limit)."""
        return (1 << 30) if self.max_length is None else self.max_length - len(self.tokens)

    def history(self) -> History:
        return History(tokens=self.tokens, num_prompt=self.num_prompt)

    def append(
        self, tokens: Sequence[int], end_ids: frozenset[int], stops: StopStrings
    ) -> list[int]:
        """Take tokens up to and including the first that ends the row; returns those taken."""
        taken: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            taken.append(token)
            if token in end_ids or stops.complete(self.tokens, self.num_prompt):
                self.finish = "stop"
            elif len(self.tokens) - self.num_prompt >= self.max_new_tokens:
                self.finish = "length"
            elif self.max_length is not None and len(self.tokens) >= self.max_length:
                self.finish = "context"
            if self.finish:
                break
        return taken

    def kept(self, policy: LengthPolicy) -> int | None:
        """How deep to draft now without a look at its statistics; None: the policy decides."""
        if self.pause < self.rests_until:
            return 0
        if self.counts and policy.keeps(len(self.counts), self.counts[-1]):
            return self.counts[-1].asked
        return None

    def wants(self, length: int, policy: LengthPolicy) -> int:
        """Take note that the policy would draft so deep now; returns that."""
        self.rests_until = 0 if length else self.pause + policy.rest(self.pause + 1)
        return length

    def count(self, offered: int, accepted: int, *, cut: bool = False) -> None:
        """Take note of a step. `cut`: a stop inside the draft, not the drafter, made it end."""
        asked = offered if cut else self.asked
        self.counts.append(StepCount(asked=asked, offered=offered, accepted=accepted))
        self.pause = 0 if self.asked else self.pause + 1

    @property
    def stats(self) -> RowStats:
        """The counts as policies read them, computed when one does."""
        self._stats = counted(self._stats, self.counts[self._stats.steps :])
        return self._stats


def wanted(rows: Sequence[Row], policy: LengthPolicy) -> list[int]:
    """How deep the policy would draft now, in each row."""
    kept = [row.kept(policy) for row in rows]
    if len(rows) > 1 and None in kept:
        depth = policy.together([row.stats for row in rows])
        if depth is not None:
            return [row.wants(depth, policy) for row in rows]
    return [
        row.wants(policy.length(row.stats), policy) if depth is None else depth
        for row, depth in zip(rows, kept, strict=True)
    ]


TEXTS = ": target.tokenizer makes token ids of a text, and draftsmith.Generator takes texts."


def token_ids(tokens: Any, label: str, vocab_size: int) -> list[int]:
    """The tokens as a list; arrays, tensors and numpy's integers are welcome.

    Raises:
        InputError: beginning with `label`: it is something else, or outside the vocabulary.
    """
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    good = isinstance(listed, Collection) and not isinstance(listed, (str, bytes, Mapping))
    if not (good and all(map(is_whole, listed))):
        raise InputError(
            f"{label} must be token ids, a list of whole numbers, got {short(listed)}{TEXTS}"
        )
    ids = [int(token) for token in listed]
    bad = [token for token in ids if not 0 <= token < vocab_size]
    if bad:
        raise InputError(
            f"{label} holds token {bad[0]}, outside the target's vocabulary of {vocab_size}: "
            "tokenizer and model do not belong together."
        )
    return ids


def several(values: Any, name: str) -> list[Any]:
    """Prompts, predictions or request ids as a list, also from an array or an iterator."""
    good = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    hint = TEXTS if isinstance(values, str) else "."
    require(good, f"{name} must be a list with an entry per row, got {short(values)}{hint}")
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def check_prompt(
    tokens: Any, label: str, target: str, vocab_size: int, max_length: int | None
) -> list[int]:
    """The tokens as a list. Raises `InputError`, which begins with `label`, unless the target can
    continue them."""
    ordered = not isinstance(tokens, Set)
    require(ordered, f"{label} is a set, which has no order: give a list of token ids.")
    ids = token_ids(tokens, label, vocab_size)
    require(len(ids) > 0, f"{label} is empty: give at least one token.")
    require(
        max_length is None or len(ids) < max_length,
        f"{label} has {len(ids)} tokens, but {target} has a context of {max_length}: shorten it "
        "so that at least one token fits behind it.",
    )
    return ids


def start_rows(
    prompts: Sequence[Sequence[int]],
    ids: Sequence[int],
    *,
    max_new_tokens: int,
    target: str,
    vocab_size: int,
    max_length: int | None,
) -> list[Row]:
    """A row per prompt, for a target of this name, vocabulary and context.

    Raises:
        InputError: a prompt that cannot be continued, or no room for a new token.
    """
    if not prompts:
        raise InputError("There is no prompt to continue.")
    if len(ids) != len(prompts):
        raise InputError(f"{len(prompts)} prompts need as many request ids, got {len(ids)}.")
    for request_id in ids:
        require(
            is_whole(request_id) and 0 <= request_id < 2**63,
            f"A request id must be a whole number from 0 to 2^63 - 1, got {short(request_id)}.",
        )
    rows = []
    for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        tokens = check_prompt(prompt, f"Prompt {number}", target, vocab_size, max_length)
        rows.append(
            Row(
                request_id=request_id,
                tokens=tokens,
                num_prompt=len(tokens),
                max_new_tokens=max_new_tokens,
                max_length=max_length,
            )
        )
    return rows
