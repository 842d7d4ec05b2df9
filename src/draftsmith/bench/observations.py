"""Perplexity and acceptance of pairs of target and draft model: what `draftsmith plan` reads.

A draft model with another tokenizer has two lines: `decoded`, the rate of our own decoder, and
`retokenised`, which is how the scaling-laws paper measured such pairs and no rate of a decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftsmith.bench.metrics import Ratio
from draftsmith.bench.pairs import (
    LONGEST,
    LengthTrial,
    Perplexity,
    acceptance,
    agreement,
    count_accepted,
    parameters_of,
    perplexity,
)
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, Generation
from draftsmith.core.sampling import Sampler
from draftsmith.data import text
from draftsmith.drafters.config import drafter_parts, kinds
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import InputError
from draftsmith.plan.acceptance import AcceptanceEstimate, estimate
from draftsmith.targets.base import Target

_log = logging.getLogger(__name__)

LENGTHS = tuple(range(1, 10))
"""The paper's draft lengths."""
DECODED = "decoded"
RETOKENISED = "retokenised"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A target with a draft model, measured."""

    name: str
    """The draft's name."""
    draft: Target
    perplexity: Perplexity
    trials: tuple[LengthTrial, ...]
    rate: Ratio | None
    """None: no draft was whole."""
    agreement: Ratio | None
    """On re-tokenised text; None for a draft with the target's tokenizer."""

    @property
    def steps(self) -> int:
        """The number of whole drafts, of all lengths."""
        return sum(sum(trial.steps) for trial in self.trials)

    @property
    def left_out(self) -> int:
        return sum(trial.left_out for trial in self.trials)

    def estimate(self) -> AcceptanceEstimate:
        """Estimate the acceptance rate from the counts, of which there must be some."""
        return estimate([count for trial in self.trials for count in trial.counts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A target and its draft models, measured on the same text and prompts."""

    target: Target
    perplexity: Perplexity
    """The target's perplexity."""
    pairs: tuple[Pair, ...]

    def rows(self, name: str, temperature: float) -> list[dict[str, Any]]:
        """The lines of observations.csv; `name`: of the target.

        Raises:
            InputError: no draft model was measured to the end: there is nothing to write.
        """
        rows = [
            row
            for pair in self.pairs
            for row in observations(name, self.target, self.perplexity, pair, temperature)
        ]
        if not rows:
            raise InputError(
                "no draft of any length was whole: give a larger --max-new-tokens, or shorter "
                "drafts"
            )
        return rows

    def counts(self, name: str) -> list[dict[str, Any]]:
        """The lines of counts.csv; `name`: of the target."""
        return [
            {
                "target": name,
                "draft": pair.name,
                "prompt": count.prompt,
                "gamma": count.gamma,
                "accepted_length": count.accepted,
                "count": count.count,
            }
            for pair in self.pairs
            for trial in pair.trials
            for count in trial.counts
        ]


def measure_pairs(
    target: Target,
    arms: Sequence[Arm],
    files: Sequence[text.TextFile],
    prompts: Sequence[Sequence[int]],
    decoding: DecodeOptions,
    lengths: Sequence[int],
    batch_size: int,
) -> Measured:
    """Perplexity on `files`, acceptance of drafts of each length behind `prompts` (token ids).

    Raises:
        InputError: a draft model without a finite perplexity, or a draft longer than the context.
    """
    drafts = [draft_model(arm) for arm in arms]
    check_room(target, lengths)
    _log.info("perplexity of %s: %d files", target.name, len(files))
    own = perplexity(target, text.documents(files))
    pairs = []
    for arm, draft in zip(arms, drafts, strict=True):
        _log.info("perplexity of %s", arm.name)
        theirs = perplexity(draft, text.documents(files))
        trials, made = count_accepted(
            target,
            arm.drafter,
            prompts,
            decoding,
            lengths,
            batch_size=batch_size,
            on_length=partial(_log.info, "%s: drafts of %d", arm.name),
        )
        pairs.append(
            Pair(
                name=arm.name,
                draft=draft,
                perplexity=theirs,
                trials=trials,
                rate=acceptance(trials),
                agreement=retokenised(arm, draft, target, made, decoding.sampler),
            )
        )
    return Measured(target=target, perplexity=own, pairs=tuple(pairs))


def refuse_others(names: Sequence[str]) -> None:
    """
    Raises:
        InputError: a drafter that is no draft model.
    """
    for name in names:
        kind, _ = drafter_parts(name)
        if kind in kinds() and kind != "independent":
            raise InputError(
                f"--drafter {name}: --perplexity is for draft models, and {kind} is none: what it "
                "drafts hangs on the target or on the text, so it has no perplexity of its own"
            )


def text_files(patterns: Sequence[str]) -> list[text.TextFile]:
    """
    Raises:
        InputError: a file that is not there, or none that is text.
    """
    found = text.find_files(patterns, flag="--perplexity")
    files = [file for file in found if text.is_utf8(file)]
    if not files:
        raise InputError(f"--perplexity {' '.join(patterns)}: none of these files is UTF-8 text")
    return files


def draft_model(arm: Arm) -> Target:
    """Return the model behind a drafter.

    Raises:
        InputError: it has no finite perplexity.
    """
    drafter = arm.drafter
    assert isinstance(drafter, Independent), "see refuse_others"
    if VocabularySubset.beside(drafter.config.source) is not None:
        raise InputError(
            f"--drafter {arm.name} knows only some of the target's tokens: the others have no "
            "probability, so its perplexity would be infinite"
        )
    assert drafter.draft_model is not None, "open_drafters has bound it"
    return drafter.draft_model


def check_room(target: Target, lengths: Sequence[int]) -> None:
    """
    Raises:
        InputError: the longest draft fills the target's context.
    """
    longest = max(lengths)
    if target.max_length is not None and longest >= target.max_length:
        raise InputError(
            f"--draft-length: a draft of {longest} tokens does not fit into the context of "
            f"{target.name}, which has {target.max_length} positions"
        )


def retokenised(
    arm: Arm, draft: Target, target: Target, made: Sequence[Generation], sampler: Sampler
) -> Ratio | None:
    """Measure agreement on the target's texts; None where the draft has the target's tokenizer."""
    drafter = arm.drafter
    if not (isinstance(drafter, Independent) and drafter.reads_text):
        return None
    return agreement(draft, target.tokenizer, made, sampler)


def observations(
    name: str, target: Target, own: Perplexity, pair: Pair, temperature: float
) -> list[dict[str, Any]]:
    """Build the lines of a pair: one per protocol."""
    alphas: list[tuple[str, Ratio, AcceptanceEstimate | None]] = []
    if pair.rate is not None:
        alphas.append((DECODED, pair.rate, pair.estimate()))
    if pair.agreement is not None:
        alphas.append((RETOKENISED, pair.agreement, None))
    return [
        {
            "target": name,
            "draft": pair.name,
            "target_ppl": own.value,
            "draft_ppl": pair.perplexity.value,
            "alpha": alpha.value,
            "moe": alpha.moe,
            "target_params": parameters_of(target),
            "draft_params": parameters_of(pair.draft),
            "alpha_least_squares": None if found is None else found.least_squares.alpha,
            "target_ppl_moe": own.moe,
            "draft_ppl_moe": pair.perplexity.moe,
            "temperature": temperature,
            "protocol": protocol,
        }
        | {
            f"tokens_per_step_{trial.gamma}": None
            if found is None
            else found.tokens_per_step.get(trial.gamma)
            for trial in pair.trials
        }
        for protocol, alpha, found in alphas
    ]


def warnings(measured: Measured) -> list[str]:
    """Return warnings about how far the numbers can be used."""
    target, own, pairs = measured.target, measured.perplexity, measured.pairs
    notes = []
    reads = {target.name: own} | {pair.name: pair.perplexity for pair in pairs}
    for name, read in reads.items():
        if read.longest < LONGEST:
            notes.append(
                f"{name} has a context of {read.longest} tokens: documents were cut there, not at "
                f"{LONGEST}"
            )
    if own.unread > own.tokens:
        notes.append(
            f"most of the text was not read: {own.unread} of its tokens lie behind the first "
            f"{own.longest} of a document. A plain file is one document; a JSONL file has one per "
            "line (field `text`)"
        )
    if own.documents == 1:
        notes.append(
            "there is one document only, so perplexities have no margin: give several files, or a "
            "JSONL file with a document per line (field `text`)"
        )
    for pair in pairs:
        if pair.rate is None:
            notes.append(f"{pair.name}: no draft was whole, so there is no decoded rate")
        if pair.agreement is not None:
            notes.append(
                f"{pair.name} has another tokenizer: its perplexity is per token of its own, and "
                f"the row {RETOKENISED!r} is the paper's protocol, not the rate of a decoder"
            )
    return notes
