"""`draftsmith bench --perplexity`: what `draftsmith plan` reads, measured on one's own models.

OUT/observations.csv   a line per pair: perplexities and acceptance rate with margins
OUT/counts.csv         a line per pair, prompt, draft length and accepted length: how many steps
OUT/run.json           how it was made; written last

A draft model with another tokenizer has two lines: `decoded`, the rate of our own decoder, and
`retokenised`, which is how the scaling-laws paper measured such pairs and no rate of a decoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from draftsmith.bench.arms import Arm
from draftsmith.bench.metrics import Ratio
from draftsmith.bench.pairs import (
    LengthTrial,
    acceptance,
    agreement,
    count_accepted,
    parameters_of,
)
from draftsmith.bench.perplexity import LONGEST, Perplexity, perplexity
from draftsmith.commands._loading import make_sampler, open_drafters, open_target
from draftsmith.commands._verbs import BenchOptions
from draftsmith.commands.bench import make_items, refuse_used_folder
from draftsmith.commands.plan._shared import say, say_written, show, write_csv
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Generation
from draftsmith.core.sampling import Sampler
from draftsmith.data import text
from draftsmith.data.suites import load_suite
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.names import drafter_parts, kinds
from draftsmith.drafters.vocabulary import VocabularySubset
from draftsmith.errors import InputError
from draftsmith.plan.acceptance import AcceptanceEstimate, estimate
from draftsmith.provenance import Run, jsonable, portable_text
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


def observe(options: BenchOptions, record: Run) -> dict[str, Any]:
    """Measure every pair, and write both files to `options.out`."""
    refuse_used_folder(options.out)
    refuse_others(options.drafters())
    files = text_files(options.perplexity)
    prompts = load_suite(options.suite, limit=options.limit)
    target = open_target(options.model)
    unshaped = replace(options.drafting, draft_length=None)
    arms = open_drafters(options.drafters(), unshaped, target)
    drafts = [draft_model(arm) for arm in arms]
    lengths = options.drafting.lengths() or LENGTHS
    check_room(target, lengths)
    temperature = options.temperatures()[0]
    decoding = DecodeOptions(
        sampler=make_sampler(temperature, options.sampling),
        max_new_tokens=options.max_new_tokens,
        rule=options.drafting.rule,
        seed=options.sampling.seed,
    )
    items = [item.tokens for item in make_items(prompts, target, options.max_new_tokens)]
    _log.info("perplexity of %s: %d files", target.name, len(files))
    own = perplexity(target, text.documents(files))
    pairs = []
    for arm, draft in zip(arms, drafts, strict=True):
        _log.info("perplexity of %s", arm.name)
        theirs = perplexity(draft, text.documents(files))
        trials, made = count_accepted(
            target,
            arm.drafter,
            items,
            decoding,
            lengths,
            batch_size=options.batch_size,
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
    return write(options, record, target, own, pairs, temperature)


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


# --------------------------------------------------------------------------- what is written


def write(
    options: BenchOptions,
    record: Run,
    target: Target,
    own: Perplexity,
    pairs: Sequence[Pair],
    temperature: float,
) -> dict[str, Any]:
    """Write the files and the table; return the JSON."""
    name = portable_text(options.model.target)
    rows = [row for pair in pairs for row in observations(name, target, own, pair, temperature)]
    if not rows:
        raise InputError(
            "no draft of any length was whole: give a larger --max-new-tokens, or shorter drafts"
        )
    counts: list[dict[str, Any]] = [
        {
            "target": name,
            "draft": pair.name,
            "prompt": count.prompt,
            "gamma": count.gamma,
            "accepted_length": count.accepted,
            "count": count.count,
        }
        for pair in pairs
        for trial in pair.trials
        for count in trial.counts
    ]
    for file, lines in (("counts.csv", counts), ("observations.csv", rows)):
        write_csv(options.out / file, list(lines[0]), [list(line.values()) for line in lines])
    notes = warnings(target, own, pairs)
    content = {
        "target": name,
        "temperature": temperature,
        "perplexity": {name: asdict(own)} | {one.name: asdict(one.perplexity) for one in pairs},
        "observations": rows,
        "steps": {pair.name: pair.steps for pair in pairs},
        "steps_left_out": {pair.name: pair.left_out for pair in pairs},
        "warnings": notes,
    }
    payload: dict[str, Any] = jsonable(content)
    record.write(options.out, results=payload)
    tell(options, own, pairs, rows, notes)
    return payload


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


def warnings(target: Target, own: Perplexity, pairs: Sequence[Pair]) -> list[str]:
    """Return warnings about how far the numbers can be used."""
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


def tell(
    options: BenchOptions,
    own: Perplexity,
    pairs: Sequence[Pair],
    rows: Sequence[dict[str, Any]],
    notes: Iterable[str],
) -> None:
    """Print the results."""
    documents = "1 document" if own.documents == 1 else f"{own.documents} documents"
    show(
        f"{rows[0]['target']}: perplexity {_with_margin(own.value, own.moe)} over {own.tokens} "
        f"tokens of {documents}, {own.cut} of them cut",
        ("draft", "perplexity", "acceptance rate", "least squares", "protocol"),
        [
            (
                row["draft"],
                _with_margin(row["draft_ppl"], row["draft_ppl_moe"]),
                _with_margin(row["alpha"], row["moe"]),
                row["alpha_least_squares"],
                row["protocol"],
            )
            for row in rows
        ],
    )
    for pair in pairs:
        lengths = [trial.gamma for trial in pair.trials]
        say(
            [
                f"{pair.steps} whole drafts of {lengths[0]} to {lengths[-1]} tokens counted; "
                f"{pair.left_out} steps left out, whose draft was shorter"
            ],
            pair.name,
        )
    say(notes)
    say_written(options.out)


def _with_margin(value: float, moe: float | None) -> str:
    return f"{value:.5g}" + ("" if moe is None else f" +- {moe:.2g}")
