"""What is displayed of a live translation: less than the whole output, so that less is erased.

    output      I see a man     I see an old man     I see an old man.   final
    hide 1      I see a         I see an old         I see an old man.
    erased                      0 (all shown: 4)     0

A display only hides the end of an output. It never changes the draft, and it shows the beginning of
the output's text unchanged: in logical order, not normalised.

A text is cut only between grapheme clusters (user-perceived characters), or between words.
Positions count characters of a Python string, as everywhere in this package.

    text       w e _ T + _ H H .       T +: a thumb and its colour, H: Han, _: a blank
    borders    0 1 2 3   5 6 7 8 9
    kinds      w w s p   s u u p       of the clusters
    word_ends      2     5   7   9

Words are separated by blanks. Finding words in scripts without blanks needs a dictionary; here
every cluster of such a script counts as a word, with the punctuation around it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import regex

from draftsmith.core.rows import common_prefix
from draftsmith.live.config import DisplayConfig

# Line breaking class SA is Thai, Lao, Khmer, Burmese and their neighbours. The extensions (scx)
# take in marks that scripts share, such as the long vowel of kana.
_UNSPACED = regex.compile(
    r"[[\p{LB=SA}\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Bopo}\p{scx=Yiii}\p{scx=Tibt}]&&\w]",
    flags=regex.VERSION1,
)
_WORD = re.compile("p*up*|[wp]+")
_SPACED_WORD = re.compile("p*w[wp]*")


def borders(text: str) -> list[int]:
    """Return 0 and the end of every grapheme cluster; other cuts would split a character."""
    return list(accumulate(map(len, regex.findall(r"\X", text)), initial=0))


def word_ends(text: str) -> list[int]:
    """Return the end of every word; each is a border."""
    places = borders(text)
    return [places[word.end()] for word in _WORD.finditer(_kinds(text, places))]


def word_borders(text: str) -> list[int]:
    """Return the borders outside words of scripts with blanks, and not after a blank."""
    places = borders(text)
    kinds = _kinds(text, places)
    barred = {i + 1 for i, kind in enumerate(kinds[:-1]) if kind == "s"}
    for word in _SPACED_WORD.finditer(kinds):
        barred.update(range(word.start() + 1, word.end()))
    return [place for i, place in enumerate(places) if i not in barred]


def _kinds(text: str, places: list[int]) -> str:
    """A letter per cluster: (s)pace, (u)nspaced script, (p)unctuation and signs, other (w)ords."""
    return "".join(_kind(text[start]) for start in places[:-1])


def _kind(character: str) -> str:
    if character.isspace():
        return "s"
    if _UNSPACED.match(character):
        return "u"
    return "w" if regex.match(r"\w", character) else "p"


_THINKS, _THOUGHT = "<think>", "</think>"
_CUT_SHORT = "\N{REPLACEMENT CHARACTER}"


class Shown(NamedTuple):
    """The display after an update."""

    shown: str = ""
    """The displayed text, the beginning of `full`."""
    stable: int = 0
    """Characters of `shown` that are not expected to change: those that were displayed before the
    update, and all of a final one."""
    full: str = ""
    """The text of the whole output."""
    erased: int = 0
    """Characters of the previous text that were removed, counted from the first that changed."""


def without_thoughts(tokens: Sequence[int], tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens after `</think>` and blanks; all tokens if the model did not think.

    The result is empty while a thought has not ended.
    """

    def text(upto: int) -> str:
        return str(tokenizer.decode(list(tokens[:upto]), skip_special_tokens=False)).lstrip()

    def answers(upto: int) -> bool:
        _, closed, answer = text(upto).partition(_THOUGHT)
        return bool(closed and answer.strip())

    if not text(len(_THINKS) + 2).startswith(_THINKS):  # a token is a byte or more
        return tuple(tokens)
    # what answers goes on to answer: a few decodings, however long it thought
    first = bisect_left(range(1, len(tokens) + 1), True, key=answers)
    return tuple(tokens[first:])


class Display:
    """Chooses what is shown of the outputs of one segment."""

    def __init__(self, config: DisplayConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._text = ""
        self._outputs: deque[tuple[int, ...]] = deque(maxlen=config.agree)

    def show(self, tokens: Sequence[int], *, final: bool) -> Shown:
        """Display an output, given whole and without end tokens; a final one is shown in full."""
        full = self._decode(tokens)
        end = len(full) if final else self._cut(full, self._end(tokens, full))
        before, self._text = self._text, full[:end]
        same = common_prefix(before, self._text)
        return Shown(self._text, end if final else same, full, len(before) - same)

    def _end(self, tokens: Sequence[int], full: str) -> int:
        """Return how many characters of `full`, the text of the tokens, may be shown: without the
        last units, or what the last outputs have in common (nothing before there are enough)."""
        agree, hide, unit = self._config.agree, self._config.mask_k, self._config.unit
        if agree is not None:
            self._outputs.append(tuple(tokens))
            if len(self._outputs) < agree:
                return 0
            agreed = min(common_prefix(tokens, other) for other in self._outputs)
            return self._covered(tokens[:agreed], full)
        if unit == "token":
            return self._covered(tokens[: max(0, len(tokens) - hide)], full)
        ends = word_ends(full) if unit == "word" else borders(full)
        if not hide:
            return len(full)
        return ends[-hide - 1] if len(ends) > hide else 0

    def _cut(self, full: str, end: int) -> int:
        """Move `end` back to a border, but not before text that must stay."""
        end = _floor(word_borders(full) if self._config.whole_words else borders(full), end)
        if not self._config.no_shrink:
            return end
        # Not moved back to a whole word: a word that grew stays on the screen as it was.
        return max(end, _floor(borders(full), common_prefix(self._text, full)))

    def _decode(self, tokens: Sequence[int]) -> str:
        """Decode the tokens, without an incomplete character at the end.

        Such a character decodes to U+FFFD. A U+FFFD that the model wrote looks the same and is not
        shown at the very end either.
        """
        # Some tokenizers turn a run of bytes into U+FFFD altogether when its last character is
        # cut short; with less of it (at most three of four bytes are there) the run is whole.
        lengths = range(len(tokens), max(len(tokens) - 4, -1), -1)
        longest = ""
        for length in lengths:
            text = str(self._tokenizer.decode(list(tokens[:length]), skip_special_tokens=True))
            longest = max(longest, text.rstrip(_CUT_SHORT), key=len)
            if not text.endswith(_CUT_SHORT):
                break
        return longest

    def _covered(self, first: Sequence[int], full: str) -> int:
        """Return the length of the first tokens in `full`; a blank may depend on the next token."""
        return common_prefix(self._decode(first), full)


def _floor(places: Sequence[int], at: int) -> int:
    """Return the last of the ascending places, which begin with 0, that is not after `at`."""
    return places[bisect_right(places, at) - 1]
