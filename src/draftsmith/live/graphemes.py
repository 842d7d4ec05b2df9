"""Where a text may be cut: between grapheme clusters (what readers take for one character), and
between words. Places count characters of a Python string, as everywhere in this package.

    text       w e _ T + _ H H .       T +: a thumb and its colour, H: Han, _: a blank
    borders    0 1 2 3   5 6 7 8 9
    kinds      w w s p   s u u p       of the clusters
    word_ends      2     5   7   9

A word is what stands between blanks. Scripts without blanks between words need a dictionary to
find them; here every cluster of these counts as a word, with the punctuation around it.
"""

from __future__ import annotations

import re
from itertools import accumulate

import regex

# Line breaking class SA is Thai, Lao, Khmer, Burmese and their neighbours. The extensions (scx)
# take in marks that scripts share, such as the long vowel of kana.
_UNSPACED = regex.compile(
    r"[[\p{LB=SA}\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Bopo}\p{scx=Yiii}\p{scx=Tibt}]&&\w]",
    flags=regex.VERSION1,
)
_WORD = re.compile("p*up*|[wp]+")
_SPACED_WORD = re.compile("p*w[wp]*")


def borders(text: str) -> list[int]:
    """0, and the end of every grapheme cluster: cut elsewhere, a character would fall apart."""
    return list(accumulate(map(len, regex.findall(r"\X", text)), initial=0))


def word_ends(text: str) -> list[int]:
    """The end of every word; each is a border."""
    places = borders(text)
    return [places[word.end()] for word in _WORD.finditer(_kinds(text, places))]


def word_borders(text: str) -> list[int]:
    """The borders that are not inside a word of a script with blanks, nor behind a blank."""
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
