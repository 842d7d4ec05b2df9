"""`draftsmith chat`: talk with a chat model, accepted drafts coloured.

In a terminal: a prompt, lines that are edited and remembered, sentences about what cannot be done.
Otherwise each line of stdin is a turn, stdout gets the answers and nothing else, and the first line
that cannot be asked ends the command.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from draftsmith.commands._options import VerbOptions
from draftsmith.commands.generate import Stream, sources_line, sources_payload
from draftsmith.config import each_at_least, require
from draftsmith.core.config import SamplingConfig, check_temperature
from draftsmith.data.prompts import text_prompts
from draftsmith.drafters.config import DraftingConfig
from draftsmith.errors import InputError, nearest
from draftsmith.targets.config import ModelConfig

if TYPE_CHECKING:
    from draftsmith.core.conversation import Conversation, Turn
    from draftsmith.core.generation import Generator
    from draftsmith.core.types import DecodeStep
    from draftsmith.targets.base import BindableTarget


@dataclass(frozen=True, kw_only=True)
class ChatOptions(VerbOptions):
    """Chat with a model; the output distribution is the target's, accepted drafts are coloured."""

    model: ModelConfig
    drafter: str = "prompt_lookup"
    """none, prompt_lookup, lookahead, independent:MODEL, or a draft model's folder."""
    system: str | None = None
    """The system text; left out: the chat template's own, if it has one."""
    max_new_tokens: int = 1024
    """Stop each answer after this many tokens."""
    temperature: float = 0.0
    """0 takes the most probable token; 1 draws from the model's own law."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)

    def validate(self) -> None:
        super().validate()
        check_temperature(self.temperature)
        each_at_least(1, self, "max_new_tokens")
        require(bool(self.drafter.strip()), "--drafter must not be empty; 'none' drafts nothing")
        require(self.system is None or bool(self.system.strip()), "--system must not be empty")
        self.drafting.refuse_range()
        self.drafting.check_assignments((self.drafter,))


def run(options: ChatOptions) -> dict[str, Any]:
    """Answer every turn until the input ends; answers go to stdout, all else to stderr.

    Returns what `--json` prints; `lossy` says why these are not the target's texts, if so.
    """
    from draftsmith.core.conversation import Conversation
    from draftsmith.core.verify import lossy_sentence
    from draftsmith.targets.hf import open_target

    require(sys.stdin is not None, "there is nothing to read: stdin is closed")
    target = open_target(options.model, quiet=True)
    params = replace(
        options.sampling.params(options.temperature), max_tokens=options.max_new_tokens
    )
    conversation = Conversation(open_generator(options, target), params, system=options.system)
    chat = _Chat(conversation, target, silent=options.json)
    lossy = lossy_sentence(options.drafting.used_rule) if options.drafting.is_lossy() else None
    if lossy is not None:
        chat.notes.print(lossy, style="bold")
    if chat.typed:
        chat.say(f"{target.name}, drafts by {options.drafter}. {_KEYS}")
    chat.hold()
    result = {"turns": [_payload(turn) for turn in chat.answered]}
    return result | ({"lossy": lossy} if lossy else {})


def open_generator(options: ChatOptions, target: BindableTarget) -> Generator:
    """The target with the drafter, whose draft length is measured where that is asked for."""
    from draftsmith.bench.arms import check_predictions, make_generator, open_drafters
    from draftsmith.bench.costs import Workload, with_controllers
    from draftsmith.core.generation import encode
    from draftsmith.core.sampling import Sampler

    (arm,) = open_drafters([options.drafter], options.drafting, target)
    check_predictions((), [arm])
    if options.drafting.draft_length == "auto":
        # costs depend on lengths alone: any turn will do
        (turn,) = text_prompts(["Tell me about the weather."], raw=False)
        workload = Workload(prompts=[encode(turn, target)], max_new_tokens=options.max_new_tokens)
        sampler = Sampler.from_params(options.sampling.params(options.temperature))
        (arm,) = with_controllers([arm], options.drafting, target, sampler, workload)
    return make_generator(target, arm, options.drafting)


def _payload(turn: Turn) -> dict[str, Any]:
    return {
        "user": turn.user,
        "text": turn.text,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "tokens_per_step": turn.metrics.tokens_per_step,
        "acceptance_rate": turn.metrics.acceptance_rate,
        "tokens_per_second": len(turn.token_ids) / turn.seconds,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "dropped_turns": turn.dropped_turns,
    } | sources_payload(turn.metrics)


_KEYS = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends."
_ENDINGS = {
    "length": "(cut at --max-new-tokens)",
    "context": "(cut: the context is full)",
    "interrupted": "(interrupted)",
}


class _Chat:
    """Reads turns and commands, prints answers."""

    def __init__(self, conversation: Conversation, target: BindableTarget, *, silent: bool) -> None:
        """`silent`: answers are only kept, for `--json`."""
        self.conversation, self.target, self.silent = conversation, target, silent
        self.typed = sys.stdin.isatty()
        self.out = Console(highlight=False, markup=False)
        self.notes = Console(stderr=True, highlight=False, markup=False, style="dim")
        self.answered: list[Turn] = []
        """Every answer, those that were taken back, too."""
        self._ended = False
        self._commands: dict[str, tuple[Callable[[str], None], str]] = {
            "/stats": (self._stats, "speed and acceptance of the last answer and of all"),
            "/undo": (self._undo, "take back the last turn and its answer"),
            "/reset": (self._reset, "forget all turns"),
            "/system": (self._system, "TEXT: change the system text; without TEXT take it away"),
            "/help": (self._help, "this list"),
            "/quit": (self._quit, "end, as Ctrl-D does"),
        }

    def say(self, sentence: str) -> None:
        self.notes.print(sentence, soft_wrap=True)

    def hold(self) -> None:
        """Answer until the input ends.

        Raises:
            InputError: a line that cannot be asked, unless it was typed: then the sentence is said.
        """
        for number, line in enumerate(self._lines(), start=1):
            try:
                self._take(line)
            except InputError as error:
                if not self.typed:
                    raise InputError(f"line {number}: {error}") from error
                self.say(str(error))
            except KeyboardInterrupt:  # just behind the end of an answer
                if not self.typed:
                    raise
            if self._ended:
                break
        if self.answered:
            self.say(_figures(self.answered, "in all"))

    def _lines(self) -> Iterator[str]:
        if isinstance(sys.stdin, io.TextIOWrapper):  # check_text refuses what is no text
            encoding = sys.stdin.encoding if self.typed else "utf-8"
            sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")
        if not self.typed:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        with contextlib.suppress(ImportError):  # not on every system; it gives `input` a history
            import readline  # noqa: F401
        prompt = "> " if sys.stdout.isatty() else ""
        while True:
            try:
                line = input(prompt)
            except (EOFError, KeyboardInterrupt) as ended:
                if prompt:
                    self.out.print()
                if isinstance(ended, EOFError):
                    return
                continue  # Ctrl-C forgets the line that is being typed
            yield line

    def _take(self, line: str) -> None:
        """A command, or a turn. A path such as /etc/hosts is no command, nor is a line that begins
        with a blank."""
        word, _, rest = line.rstrip().partition(" ")
        if word.startswith("/") and word[1:].isalpha():
            if word not in self._commands:
                raise InputError(f"there is no command {word}{nearest(word, self._commands)}")
            self._commands[word][0](rest.strip())
        elif line.strip():
            self._answer(line.strip())

    def _answer(self, text: str) -> None:
        stream = Stream(self.target.tokenizer, self.out)

        def show(step: DecodeStep) -> None:
            stream.add(step.emitted[0], step.accepted[0])

        turns = self.conversation.turns
        last = turns[-1] if turns else None
        try:
            with _interruptible() as stop:
                turn = self.conversation.ask(text, on_step=None if self.silent else show, stop=stop)
            made = [turn]
        except KeyboardInterrupt:  # a second one, which did not wait for the step
            made = [turn for turn in turns[-1:] if turn is not last]
        self.answered += made
        if not self.silent:
            stream.finish()
        finish = made[0].finish_reason if made else "interrupted"
        if finish in _ENDINGS:
            self.say(_ENDINGS[finish])

    def _stats(self, _: str) -> None:
        require(bool(self.answered), "there is no answer yet")
        last = self.answered[-1]
        known = f"{last.cached_tokens} of {last.prompt_tokens} tokens of the chat were cached"
        self.say(f"{_figures([last], 'the last answer')}; {known}")
        if len(self.answered) > 1:
            self.say(_figures(self.answered, f"all {len(self.answered)} answers"))

    def _undo(self, _: str) -> None:
        first, *_more = self.conversation.undo().user.splitlines()
        self.say(f"taken back: {first}")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.say("the chat begins anew")

    def _system(self, text: str) -> None:
        self.conversation.set_system(text or None)
        self.say("the system text is changed" if text else "the system text is taken away")

    def _help(self, _: str) -> None:
        for word, (_run, meaning) in self._commands.items():
            self.say(f"{word:<8} {meaning}")
        self.say("A line that begins with a blank is no command. Ctrl-C stops an answer.")

    def _quit(self, _: str) -> None:
        self._ended = True


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has come; it no longer breaks into a step, so that what is cached stays good.
    A second one does: a step that reads a long chat takes seconds."""
    came = False

    def note(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def has_come() -> bool:
        return came

    before = signal.getsignal(signal.SIGINT)
    heeded = before is not None and before != signal.SIG_IGN
    ours = heeded and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield has_come
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _figures(turns: Sequence[Turn], what: str) -> str:
    """Tokens, steps, speed and acceptance of these answers."""
    counts = sum((turn.metrics for turn in turns[1:]), turns[0].metrics)
    speed = counts.emitted / sum(turn.seconds for turn in turns)
    said = (
        f"{what}: {counts.emitted} tokens in {counts.steps} steps, "
        f"{counts.tokens_per_step:.2f} per step (tau), {speed:.1f} tokens/s"
    )
    if counts.acceptance_rate is not None:
        said += f"; {100 * counts.acceptance_rate:.0f} % of the drafted tokens were accepted"
    if counts.sources:
        said += f"; {sources_line(counts)}"
    return said
