"""`draftsmith generate`: answer or continue prompts with a target and a drafter.

Text that appears as it is decoded, accepted drafts coloured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Leading, Many, each_at_least, require, unused
from draftsmith.core.config import SamplingConfig, check_temperature
from draftsmith.data.prompts import note_plain, text_prompts
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import InputError
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.core.generation import DraftCounts, Generation
    from draftsmith.core.types import DecodeStep


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(VerbOptions):
    """Answer or continue prompts, with a drafter; the output distribution is the target's."""

    model: ModelConfig
    drafter: str = "none"
    """none, prompt_lookup, lookahead, independent:MODEL, prediction, or a draft model's folder."""
    prompt: Annotated[Many, Leading] = ()
    """A prompt; may be given several times. It goes through the chat template, if there is one."""
    raw: bool = False
    """Continue --prompt as it stands, without the model's chat template."""
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
        each_at_least(1, self, "max_new_tokens", "batch_size", "limit")
        given = bool(self.prompt) + (self.prompts is not None)
        require(given == 1, "give prompts either by --prompt TEXT or by --prompts FILE")
        require(all(self.prompt), "--prompt must not be empty")
        if self.prompts is not None:
            needs = "--prompt; in a file, a `prompt` or `text` is continued as it stands anyway"
            unused("--raw", self.raw, False, needs)
        require(all(self.stop), "--stop must not be empty")
        require(bool(self.drafter.strip()), "--drafter must not be empty; 'none' drafts nothing")
        require(not (self.stream and self.json), "--stream and --json exclude each other")
        self.drafting.refuse_range()
        self.drafting.check_assignments((self.drafter,))


def run(options: GenerateOptions) -> dict[str, Any]:
    """Continue every prompt; texts go to stdout as they are done, figures to stderr.

    Returns what `--json` prints; `lossy` says why these are not the target's texts, if so.
    """
    from draftsmith.bench.arms import check_predictions, make_generator, open_drafters
    from draftsmith.core.generation import DraftCounts, encode, prediction
    from draftsmith.core.sampling import Sampler
    from draftsmith.core.verify import lossy_sentence
    from draftsmith.targets.hf import HFTarget, open_target

    if options.stream and options.batch_size > 1:
        raise InputError("--stream shows one text at a time: leave out --batch-size.")
    prompts = text_prompts(options.prompt, raw=options.raw)
    if options.prompts is not None:
        from draftsmith.data.suites import load_prompts

        prompts = load_prompts(options.prompts, limit=options.limit)
    params = replace(
        options.sampling.params(options.temperature),
        stop=options.stop,
        max_tokens=options.max_new_tokens,
    )
    out = Console(highlight=False, markup=False)
    notes = Console(stderr=True, highlight=False, markup=False, style="dim")
    target = open_target(options.model, quiet=True)
    (arm,) = open_drafters([options.drafter], options.drafting, target)
    check_predictions(prompts, [arm])
    if options.prompts is not None:
        note_plain(prompts, target.tokenizer)
    ids = [encode(prompt, target) for prompt in prompts]
    predictions = [prediction(prompt, target) for prompt in prompts]
    if options.drafting.draft_length == "auto":
        from draftsmith.bench.costs import Workload, with_controllers

        workload = Workload(
            prompts=ids,
            max_new_tokens=options.max_new_tokens,
            predictions=predictions,
            rows=min(options.batch_size, len(ids)),
        )
        sampler = Sampler.from_params(params)
        (arm,) = with_controllers([arm], options.drafting, target, sampler, workload)
    generator = make_generator(target, arm, options.drafting)
    lossy = lossy_sentence(options.drafting.used_rule) if options.drafting.is_lossy() else None
    if lossy is not None:
        notes.print(lossy, style="bold")
    later = sum(len(prompt.turns) for prompt in prompts)
    if later:
        notes.print(
            f"{later} further turns of the chats are not asked: each has its first answered"
        )
    results: list[dict[str, Any]] = []
    total = DraftCounts()
    streams: dict[int, Stream] = {}

    def show(step: DecodeStep, rows: range) -> None:
        """Print what one step gave to the one text of its batch."""
        number = rows[0]
        if number not in streams:
            _print_prompt(out, prompts[number].asked, len(prompts), number)
            streams[number] = Stream(target.tokenizer, out, options.stop)
        streams[number].add(step.emitted[0], step.accepted[0])

    def done(number: int, generation: Generation) -> None:
        nonlocal total
        results.append(
            {
                "prompt": prompts[number].render(target.tokenizer),
                "text": generation.text or "",
                "token_ids": generation.token_ids,
                "finish_reason": generation.finish_reason,
                "tokens_per_step": generation.metrics.tokens_per_step,
                "acceptance_rate": generation.metrics.acceptance_rate,
            }
            | sources_payload(generation.metrics)
            | ({"sources": generation.sources} if generation.metrics.sources else {})
        )
        total = total + generation.metrics
        if options.stream:
            streams[number].finish()
        elif not options.json:
            _print_prompt(out, prompts[number].asked, len(prompts), number)
            write_text(out, f"{generation.text or ''}\n")

    generator.generate(
        ids,
        params,
        batch_size=options.batch_size,
        predictions=predictions,
        on_step=show if options.stream else None,
        on_done=done,
    )
    said = f"{total.emitted} tokens in {total.steps} steps, {total.tokens_per_step:.2f} per step"
    if total.acceptance_rate is not None:
        said += f"; {100 * total.acceptance_rate:.0f} % of the drafted tokens were accepted"
    notes.print(said + (f"; {lossy}" if lossy else ""), soft_wrap=True)
    if total.sources:
        notes.print(sources_line(total), soft_wrap=True)
    how: dict[str, Any] = {}
    if options.model.fixed_width is not None:  # what it was asked for
        assert isinstance(target, HFTarget), "other targets refuse the option"
        how = {"engine": target.engine, "exact": target.exact}
    return {"results": results} | how | ({"lossy": lossy} if lossy else {})


def sources_payload(counts: DraftCounts) -> dict[str, Any]:
    """What `--json` says about the sources of a drafter that joins several; else nothing."""
    return {"accepted_by_source": counts.by_source} if counts.sources else {}


def sources_line(counts: DraftCounts) -> str:
    """Whose drafts the accepted tokens were, of a drafter that joins several."""
    own = ", ".join(f"{name} {count}" for name, count in counts.by_source.items())
    return f"accepted tokens by source: {own}"


def _print_prompt(out: Console, prompt: str, count: int, number: int) -> None:
    """With several prompts, say which one follows."""
    if count > 1:
        first, *_ = prompt.strip().splitlines() or [""]  # a plugin's prompt may be blanks alone
        short = first if len(first) <= 72 else f"{first[:71]}\N{HORIZONTAL ELLIPSIS}"
        out.print(Text(f"--- {number + 1}/{count}  {short}", style="bold"), soft_wrap=True)


DRAFTED = "green"
"""Style of tokens that a drafter proposed and the target accepted."""
_GREEN, _RESET = "\x1b[32m", "\x1b[0m"
# What a terminal would act on: a model must not ring bells or move the cursor.
_ACTIVE = {code: None for code in (*range(32), 127, *range(128, 160)) if code not in (9, 10)}


def write_text(console: Console, text: str, *, drafted: bool = False) -> None:
    """A model's text as it is (rich would turn its tabs into blanks), coloured in a terminal."""
    if console.is_terminal:
        text = text.translate(_ACTIVE)
    if drafted and console.color_system is not None and not console.legacy_windows:
        text = f"{_GREEN}{text}{_RESET}"
    console.file.write(text)


class Stream:
    """Prints one text while it is decoded; nothing from a stop string on."""

    def __init__(self, tokenizer: Any, console: Console, stop_strings: Sequence[str] = ()) -> None:
        from draftsmith.core.generation import Detokenizer
        from draftsmith.core.rows import StopStrings

        self._detokenizer = Detokenizer(tokenizer)
        self._console = console
        self._stops = StopStrings(stop_strings, tokenizer)
        self._held = ""
        self._drafted: list[bool] = []
        """Whether each character that is held was drafted."""
        self._stopped = False

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """Take one step's tokens; the first `accepted` of them were drafted."""
        for number, token in enumerate(tokens):
            self._put(self._detokenizer.add(token), number < accepted)

    def finish(self) -> None:
        self._put(self._detokenizer.finish(), False)
        self._print(len(self._held))
        write_text(self._console, "\n")
        self._console.file.flush()  # who reads a pipe waits for the end of the line

    def _put(self, text: str, drafted: bool) -> None:
        if self._stopped:
            return
        self._held += text
        self._drafted += [drafted] * len(text)
        whole = len(self._stops.cut(self._held))
        if whole < len(self._held):
            self._stopped = True
            self._print(whole)
            self._held = ""
            return
        # the end of what is held may be the beginning of a stop string
        begun = (s[:n] for s in self._stops.strings for n in range(1, len(s)))
        hidden = max((len(part) for part in begun if self._held.endswith(part)), default=0)
        self._print(len(self._held) - hidden)

    def _print(self, length: int) -> None:
        """Print the first `length` characters of what is held."""
        start = 0
        for drafted, run in groupby(self._drafted[:length]):
            end = start + len(list(run))
            write_text(self._console, self._held[start:end], drafted=drafted)
            start = end
        self._held, self._drafted = self._held[length:], self._drafted[length:]
        self._console.file.flush()
