"""A chat that goes on: `Conversation` keeps what was said, and what the target computed of it.

Every answer is asked for with the whole chat, rendered anew. A session reuses what it shares with
the chat before it, so that a turn costs its own tokens and not those of all turns (and of the last
answer, from where the tokenizer would have split its text in another way than the target did):

    system  user assistant  user assistant  user            tokens of the chat
    `------ cached, as far as equal ------'`---- fed ----'

A chat that outgrows the context loses its oldest turns; the system text stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.config import check_text, require, require_kind
from draftsmith.core.config import SamplingParams
from draftsmith.core.decode import Session
from draftsmith.core.generation import DraftCounts, Generator
from draftsmith.core.rows import StopStrings, check_prompt, common_prefix
from draftsmith.core.types import DecodeStep
from draftsmith.data.prompts import Message, Prompt, has_chat_template, render_chat

_log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"
_ROOM = 4
"""Old turns go while less than this part of the context is left for an answer that may need it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the user said, and the answer."""

    user: str
    text: str
    """The answer, without special tokens and cut before a stop string."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, `length`, `context` or `interrupted`."""
    metrics: DraftCounts
    seconds: float
    prompt_tokens: int
    """Length of the whole chat before the answer."""
    cached_tokens: int
    """How many of these were known from the turn before."""
    dropped_turns: int
    """Oldest turns that had to go before this one could be asked."""


class Conversation:
    """A chat with the target of a generator.

        conversation = Conversation(Generator("Qwen/Qwen3-0.6B", drafter="prompt_lookup"))
        conversation.ask("Name three rivers.").text
        conversation.ask("Which of them is the longest?").metrics.acceptance_length

    Args:
        params: None: greedy, and up to the end of the context.
        system: the system text; None: the template's own, if it has one.

    Raises:
        InputError: the target has no chat template, or its template takes no system text.
    """

    def __init__(
        self,
        generator: Generator,
        params: SamplingParams | None = None,
        *,
        system: str | None = None,
    ) -> None:
        require_kind("generator", generator, Generator)
        params = SamplingParams(temperature=0.0, max_tokens=None) if params is None else params
        require_kind("params", params, SamplingParams)
        require(params.n == 1, f"a chat has one answer to a turn, not n={params.n}")
        self._generator, self._target, self._params = generator, generator.target, params
        require(
            has_chat_template(self._target.tokenizer),
            f"{self._target.name} has no chat template, so there is no chat to hold with it: use "
            "`generate`, which continues texts.",
        )
        self.turns: list[Turn] = []
        """Those that the next one follows."""
        self.system: str | None = None
        self._session = Session()
        self._asked = 0
        if system is not None:
            self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Change the system text, for the turns before, too; None: the template's own.

        Raises:
            InputError: it is empty, or the chat template refuses or leaves out a system text.
        """
        if text is not None:
            check_text(text, "the system text")
            require(bool(text.strip()), "the system text is empty")
            chat = [Message(role="system", content=text), Message(role="user", content="Hello")]
            try_out = render_chat(self._target.tokenizer, chat)
            require(
                text.strip() in try_out,
                f"the chat template of {self._target.name} leaves out the system text: say it in "
                "the first turn",
            )
        self.system = text

    def undo(self) -> Turn:
        """Take back the last turn with its answer.

        Raises:
            InputError: there is none.
        """
        require(bool(self.turns), "there is no turn to take back")
        return self.turns.pop()

    def reset(self) -> None:
        """Forget all turns; the system text stays."""
        self.turns.clear()

    def ask(
        self,
        text: str,
        *,
        on_step: Callable[[DecodeStep], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Turn:
        """Answer one turn of the user, and remember both.

        An answer that is interrupted, by `stop` or by a KeyboardInterrupt, is remembered as far as
        it went; one that had not begun is forgotten with its question.

        Args:
            on_step: called with every step (to stream).
            stop: asked behind every step whether to end the answer there.

        Raises:
            InputError: the text is empty, does not fit into the context even alone, or the chat
                template refuses it. The conversation is as before.
        """
        check_text(text, "the turn")
        require(bool(text.strip()), "the turn is empty: there is nothing to answer")
        prompt, dropped = self._fit(text)
        del self.turns[:dropped]
        if dropped:
            _log.info(
                "the oldest %d of %d turns are forgotten: the context of %s is full",
                dropped,
                dropped + len(self.turns),
                self._target.name,
            )
        known = self._session.tokens[0] if self._session.tokens else []
        cached = min(common_prefix(prompt, known), len(prompt) - 1)
        tokens: list[int] = []
        finish, start = INTERRUPTED, time.perf_counter()
        counts = DraftCounts(sources=self._generator.drafter.sources)

        def made() -> Turn:
            seconds = time.perf_counter() - start
            stops = StopStrings(self._params.stop_strings, self._target.tokenizer)
            answer = self._target.tokenizer.decode(tokens, skip_special_tokens=True)
            turn = Turn(
                user=text,
                text=stops.cut(answer),
                token_ids=tuple(tokens),
                finish_reason=finish,
                metrics=counts,
                seconds=seconds,
                prompt_tokens=len(prompt),
                cached_tokens=cached,
                dropped_turns=dropped,
            )
            if tokens:
                self.turns.append(turn)
            return turn

        # each turn has draws of its own: asked again, also after `undo`, it is answered anew
        self._asked += 1
        steps = self._generator.steps(
            [prompt], self._params, request_ids=[self._asked - 1], session=self._session
        )
        try:
            for step in steps:
                tokens.extend(step.emitted[0])
                counts.add_step(step, 0)
                finish = step.finish[0] or finish
                if on_step is not None:
                    on_step(step)
                if stop():
                    break
        except KeyboardInterrupt:
            made()
            raise
        finally:
            steps.close()
        return made()

    def _fit(self, text: str) -> tuple[list[int], int]:
        """(the chat as tokens, how many of the oldest turns were left out of it)."""
        limit = self._target.max_length
        wanted = 1
        if limit is not None:
            wanted = max(1, min(self._params.max_tokens or limit, limit // _ROOM))
        for dropped in range(len(self.turns) + 1):
            ids = self._tokens(text, dropped)
            if limit is None or len(ids) + wanted <= limit:
                break
        name, size = self._target.name, self._target.vocab_size
        return check_prompt(ids, "this turn", name, size, limit), dropped

    def _tokens(self, text: str, dropped: int) -> tuple[int, ...]:
        chat = [] if self.system is None else [Message(role="system", content=self.system)]
        for turn in self.turns[dropped:]:
            chat.append(Message(role="user", content=turn.user))
            chat.append(Message(role="assistant", content=turn.text))
        chat.append(Message(role="user", content=text))
        prompt = Prompt(id=str(len(self.turns) + 1), messages=tuple(chat))
        return prompt.token_ids(self._target.tokenizer)
