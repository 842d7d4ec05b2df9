"""What a reader sees of a live translation: masks, agreement, and where a text may be cut."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftsmith.errors import InputError
from draftsmith.live.display import (
    Display,
    DisplayConfig,
    Shown,
    borders,
    without_thoughts,
    word_borders,
    word_ends,
)

CUT_SHORT = "\N{REPLACEMENT CHARACTER}"
FAMILY = "👨‍👩‍👧‍👦"
FLAGS = "🇩🇪🇫🇷"
HELLO = "مرحبًا بالعالم 123 \N{RIGHT-TO-LEFT MARK}abc!"


class Bytes:
    """A token is a byte; 256 is a special token, 257 and so on are runs of bytes."""

    def __init__(self, *runs: bytes) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"", *runs]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return b"".join(self.tokens[token] for token in tokens).decode(errors="replace")


class Pieces:
    """Tokens are the pieces of a text, in the order in which they were first seen."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def encode(self, text: str) -> list[int]:
        """`I| see` is two tokens."""
        pieces = text.split("|") if text else []
        self.known += [piece for piece in pieces if piece not in self.known]
        return [self.known.index(piece) for piece in pieces]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(self.known[token] for token in tokens)


class Tidy(Pieces):
    """Drops the blank before a full stop."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return super().decode(tokens, skip_special_tokens).replace(" .", ".")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Spells all but ASCII letters in byte tokens, as SentencePiece models do."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def screens(options: DisplayConfig, *outputs: str) -> list[Shown]:
    """What is shown of outputs written as `I| see`; the last one is final."""
    tokenizer = Pieces()
    display = Display(options, tokenizer)
    last = len(outputs) - 1
    return [display.show(tokenizer.encode(o), final=i == last) for i, o in enumerate(outputs)]


def texts(options: DisplayConfig, *outputs: str) -> list[str]:
    return [shown.shown for shown in screens(options, *outputs)]


def show_bytes(options: DisplayConfig, text: str) -> str:
    """The first screen of a segment whose output is `text`, a token per byte."""
    return Display(options, Bytes()).show(list(text.encode()), final=False).shown


MAN = ("I| see| a| man", "I| see| an| old| man", "I| see| an| old| man|.")


def test_the_drawing_of_the_module() -> None:
    plain, masked = screens(DisplayConfig(), *MAN), screens(DisplayConfig(mask_k=1), *MAN)
    assert [shown.shown for shown in plain] == [text.replace("|", "") for text in MAN]
    assert [shown.erased for shown in plain] == [0, 4, 0]
    assert [shown.shown for shown in masked] == ["I see a", "I see an old", "I see an old man."]
    assert [shown.erased for shown in masked] == [0, 0, 0]
    assert [shown.full for shown in masked] == [shown.full for shown in plain]


@pytest.mark.parametrize("unit", ["token", "word", "char"])
@pytest.mark.parametrize("hide", [4, 7, 1000])
def test_a_mask_longer_than_the_output_shows_nothing_until_it_is_final(
    unit: str, hide: int
) -> None:
    options = DisplayConfig(mask_k=hide, unit=unit)
    first, empty, last = screens(options, "a| b|c|d" if unit == "token" else "a| b", "", "a| b")
    assert (first.shown, first.stable, first.erased) == ("", 0, 0)
    assert (empty.shown, empty.full) == ("", "")
    assert (last.shown, last.stable, last.erased) == ("a b", 3, 0)


def test_units_of_the_mask() -> None:
    output = "The| old| man|,| who| slept|."

    def shown(unit: str, hide: int) -> str:
        return screens(DisplayConfig(unit=unit, mask_k=hide), output, output)[0].shown

    assert shown("token", 2) == "The old man, who"
    assert shown("word", 2) == "The old man,"
    assert shown("char", 2) == "The old man, who slep"
    assert show_bytes(DisplayConfig(unit="char", mask_k=1), f"x{FAMILY}") == "x"
    assert (
        show_bytes(DisplayConfig(unit="word", mask_k=1), "我用Python写代码。") == "我用Python写代"
    )
    assert show_bytes(DisplayConfig(unit="word", mask_k=3), "我用Python写代码。") == "我用Python"


def test_what_is_hidden_by_a_moved_mask_alone_comes_off_the_screen_unless_told_to_stay() -> None:
    outputs = ("a| b| c| d", "a| b| c", "a| b| c")
    naive = screens(DisplayConfig(mask_k=1), *outputs)
    kept = screens(DisplayConfig(mask_k=1, no_shrink=True), *outputs)
    assert [shown.shown for shown in naive] == ["a b c", "a b", "a b c"]
    assert [shown.shown for shown in kept] == ["a b c", "a b c", "a b c"]
    assert [shown.erased for shown in naive] == [0, 2, 0]
    assert [shown.erased for shown in kept] == [0, 0, 0]


def test_what_changed_does_not_stay() -> None:
    kept = DisplayConfig(mask_k=2, no_shrink=True)
    assert texts(kept, "a| b| c| d| e", "a| b| x", "") == ["a b c", "a b ", ""]
    # The letter on the screen is no letter of the new output: that one bears an accent.
    accented = screens(kept, "e| n| m", "e|\N{COMBINING ACUTE ACCENT}| n", "")
    assert [shown.shown for shown in accented] == ["e", "", ""]
    assert accented[1].erased == 1


def test_a_word_that_grew_stays_although_only_whole_words_are_shown() -> None:
    outputs = ("the| cat", "the| cat|amaran", "the| cat|amaran")
    moved = texts(DisplayConfig(mask_k=1, whole_words=True), *outputs)
    kept = texts(DisplayConfig(whole_words=True, agree=2, no_shrink=True), *outputs)
    assert moved == ["the", "the", "the catamaran"]
    assert kept == ["", "the", "the catamaran"]
    options = DisplayConfig(mask_k=1, whole_words=True, no_shrink=True)
    shown = screens(options, "a| b| c", "a| bc", "")
    assert shown[0].shown == shown[1].shown == "a b" and shown[1].erased == 0


def test_whole_words_of_scripts_with_blanks_only() -> None:
    def shown(text: str, hide: int) -> str:
        return show_bytes(DisplayConfig(unit="char", mask_k=hide, whole_words=True), text)

    assert shown("Guten Morgen, Welt", 2) == "Guten Morgen,"
    assert shown("Guten Morgen, Welt", 5) == "Guten Morgen,"
    assert shown("Guten Morgen, Welt", 6) == "Guten"
    assert shown("Donaudampfschiff", 1) == ""
    assert shown("Guten Morgen ", 0) == "Guten Morgen "
    assert shown("今天天气很好。", 2) == "今天天气很"
    assert shown("今天天气很好。", 1) == "今天天气很好"
    assert shown("私はコーヒーを飲む", 4) == "私はコーヒ"
    assert shown("カタカナ", 1) == "カタカ"
    assert shown("ภาษาไทย", 2) == "ภาษาไ"
    assert shown("ພາສາ", 1) == "ພາສ"
    assert shown("很好。」", 1) == "很好。"
    assert shown("我用Python写", 3) == "我用"
    assert shown("한국어 좋아요", 1) == "한국어"


def test_agreement_by_hand() -> None:
    outputs = ("I| see| a| man", "I| see| an| old| man", "I| see| an| old| house", "I| saw")
    two = screens(DisplayConfig(agree=2), *outputs, outputs[-1])
    assert [shown.shown for shown in two] == ["", "I see", "I see an old", "I", "I saw"]
    assert [shown.erased for shown in two] == [0, 0, 0, 11, 0]
    three = texts(DisplayConfig(agree=3), *outputs, outputs[-1])
    assert three == ["", "", "I see", "I", "I saw"]
    # In whole tokens, though the texts agree in letters.
    assert texts(DisplayConfig(agree=2), "a| house", "a| horse", "") == ["", "a", ""]


def test_agreement_holds_its_own_copy_of_what_it_saw() -> None:
    display = Display(DisplayConfig(agree=2), Bytes())
    output = list(b"abc")
    display.show(output, final=False)
    output[1:] = b"xy"
    assert display.show(output, final=False).shown == "a"


def test_special_tokens_and_blanks_at_the_edges() -> None:
    shown = Display(DisplayConfig(), Bytes()).show([*b" a ", 256], final=True)
    assert shown.shown == shown.full == " a "


SPLIT = ["你好", "a👍🏽b", FAMILY, FLAGS, "über", HELLO, "नमस्ते"]


@pytest.mark.parametrize("text", SPLIT)
@pytest.mark.parametrize(
    "make", [Bytes, tiny_tokenizer, byte_fallback_tokenizer], ids=["bytes", "bpe", "byte-fallback"]
)
def test_a_split_character_is_not_shown(text: str, make: Callable[[], Any]) -> None:
    tokenizer = make()
    if make is tiny_tokenizer:
        tokens = tokenizer.encode(text)
        assert len(tokens) > len(text), "characters must be split for this test"
    else:
        tokens = list(text.encode())
    grown, full = Display(DisplayConfig(), tokenizer), ""
    for n in range(len(tokens) + 1):
        for final in (False, True):
            cut = Display(DisplayConfig(), tokenizer).show(tokens[:n], final=final)
            assert CUT_SHORT not in cut.full and text.startswith(cut.full)
            assert cut.shown == cut.full
        masked = Display(DisplayConfig(mask_k=len(tokens) - n), tokenizer)
        assert CUT_SHORT not in masked.show(tokens, final=False).shown
        assert len(cut.full) >= len(full), "a whole character went away again"
        full = grown.show(tokens[:n], final=False).full
    assert full == text


def test_the_whole_character_before_a_split_one_is_shown() -> None:
    for tokenizer in (Bytes(), byte_fallback_tokenizer()):
        tokens = list("你好".encode())
        shown = [
            Display(DisplayConfig(), tokenizer).show(tokens[:n], final=False).shown
            for n in range(7)
        ]
        assert shown == ["", "", "", "你", "你", "你", "你好"]


def test_a_token_may_hold_a_whole_character_and_begin_another() -> None:
    runs = Bytes("你好".encode()[:4])
    shown = Display(DisplayConfig(), runs).show([*b"a", 257], final=False)
    assert shown.shown == shown.full == "a你"


def test_the_hidden_token_is_not_shown_where_it_changes_the_text_before_it() -> None:
    tokenizer = Tidy()
    tokens = tokenizer.encode("The end |.")
    shown = Display(DisplayConfig(mask_k=1), tokenizer).show(tokens, final=False)
    assert (shown.shown, shown.full) == ("The end", "The end.")


def test_a_replacement_character_inside_the_text_is_the_outputs_own() -> None:
    assert show_bytes(DisplayConfig(), f"a{CUT_SHORT}b") == f"a{CUT_SHORT}b"
    garbage = Display(DisplayConfig(), Bytes()).show([97, *[0x80] * 6], final=True)
    assert garbage.shown == garbage.full == "a"


@pytest.mark.parametrize(
    "cluster", [FAMILY, "🇩🇪", "👍🏽", "❤️", "1️⃣", "e\u0301\u0323", "\u1112\u1161\u11ab"]
)
def test_a_cluster_is_shown_whole_or_not_at_all(cluster: str) -> None:
    text = f"{cluster}x{cluster}{cluster}"
    n, size = len(text.encode()), len(cluster)
    whole = {text[:end] for end in (0, size, size + 1, 2 * size + 1)} | {text}
    seen = {show_bytes(DisplayConfig(mask_k=hide), text) for hide in range(n + 1)}
    assert seen == whole


def test_right_to_left_text_goes_through_as_it_is() -> None:
    for hide in range(5):
        shown = show_bytes(DisplayConfig(unit="word", mask_k=hide), HELLO)
        assert HELLO.startswith(shown)
    assert show_bytes(DisplayConfig(), HELLO) == HELLO
    assert show_bytes(DisplayConfig(unit="word", mask_k=2), HELLO) == "مرحبًا بالعالم"


def test_two_spellings_of_one_letter_are_not_one() -> None:
    composed, apart = "\u00e9", "e\u0301"
    shown = screens(DisplayConfig(), composed, apart, apart)
    assert [one.shown for one in shown] == [composed, apart, apart]
    assert [one.erased for one in shown] == [0, 1, 0]


def test_the_drawing_of_the_places() -> None:
    text = "we 👍🏽 我们。"
    assert borders(text) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert word_ends(text) == [2, 5, 7, 9]
    assert word_borders(text) == [0, 2, 5, 7, 8, 9]
    assert (borders(""), word_ends(""), word_borders("")) == ([0], [], [0])


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"mask_k": -1}, "--mask-k"),
        ({"mask_k": 1.5}, "--mask-k"),
        ({"mask_k": "3"}, "--mask-k"),
        ({"agree": 1}, "--agree"),
        ({"unit": "words"}, "--unit"),
        ({"agree": 2, "mask_k": 1}, "--agree"),
    ],
)
def test_options_that_mean_nothing_are_refused(values: dict[str, object], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        DisplayConfig(**values)


# Properties of any stream of outputs, under any options.

EMOJI, REGIONS = "👩👧👍❤", "🇩🇪🇫"
ALPHABET = "abcé .," + "我们あーไน้کم" + "\u0301\u200d\ufe0f🏽\u200f" + EMOJI + REGIONS
UNITS = st.sampled_from(["token", "word", "char"])
KEEPS = {"no_shrink": st.booleans(), "whole_words": st.booleans()}
OPTIONS = st.builds(DisplayConfig, mask_k=st.integers(0, 12), unit=UNITS, **KEEPS) | st.builds(
    DisplayConfig, agree=st.integers(2, 4), **KEEPS
)


@st.composite
def streams(draw: st.DrawFn) -> list[list[int]]:
    """Outputs in bytes; each keeps a beginning of the one before, which may end in a character."""
    outputs: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 5))):
        kept = outputs[-1][: draw(st.integers(0, len(outputs[-1])))]
        outputs.append([*kept, *draw(st.text(ALPHABET, max_size=12)).encode()])
    return outputs[1:]


def shared(a: str, b: str) -> int:
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def falls_apart(text: str, at: int) -> bool:
    """Would a cut at `at` go through a cluster? The rules of UAX 29 that the alphabet needs."""
    if not 0 < at < len(text):
        return False
    before, after = text[:at], text[at]
    if after in "\u200d\ufe0f🏽" or unicodedata.category(after) in ("Mn", "Me"):
        return before[-1] != "\u200f"
    if after in EMOJI and before.endswith("\u200d"):
        return before.rstrip("\u0301\u200d\ufe0f🏽\u0e49")[-1:] in tuple(EMOJI)
    regions = len(before) - len(before.rstrip(REGIONS))
    return after in REGIONS and regions % 2 == 1


@settings(max_examples=400, deadline=None)
@given(options=OPTIONS, outputs=streams())
def test_every_screen_of_a_stream(options: DisplayConfig, outputs: list[list[int]]) -> None:
    display, before = Display(options, Bytes()), ""
    for i, tokens in enumerate([*outputs, outputs[-1]]):
        final = i == len(outputs)
        shown = display.show(tokens, final=final)
        assert shown.full == bytes(tokens).decode(errors="replace").rstrip(CUT_SHORT)
        assert shown.full.startswith(shown.shown)
        assert shown.shown == shown.full or not final
        assert not falls_apart(shown.full, len(shown.shown))
        same = shared(before, shown.shown)
        assert shown.erased == len(before) - same
        assert shown.stable == (len(shown.shown) if final else same)
        if options.no_shrink:
            stays = shared(before, shown.full)
            while falls_apart(shown.full, stays):
                stays -= 1
            assert len(shown.shown) >= stays
        before = shown.shown


@settings(max_examples=200, deadline=None)
@given(text=st.text(ALPHABET, max_size=20), unit=UNITS, words=st.booleans())
def test_hiding_more_shows_less_and_hiding_everything_nothing(
    text: str, unit: str, words: bool
) -> None:
    shown = [
        show_bytes(DisplayConfig(mask_k=hide, unit=unit, whole_words=words), text)
        for hide in range(len(text.encode()) + 1)
    ]
    assert shown[0] == text
    assert all(more.startswith(less) for more, less in pairwise(shown))
    assert shown[-1] == ""


@given(text=st.text(ALPHABET, max_size=20), hide=st.integers(0, 60))
def test_a_token_mask_shows_what_the_other_tokens_say_and_no_less(text: str, hide: int) -> None:
    data = text.encode()
    said = data[: max(0, len(data) - hide)].decode(errors="ignore")
    end = len(said)
    while falls_apart(text, end):
        end -= 1
    assert show_bytes(DisplayConfig(mask_k=hide), text) == text[:end]


@given(outputs=st.lists(st.text("abc ", max_size=10), min_size=2, max_size=6))
def test_agreement_of_two_never_takes_back_what_the_new_output_says_too(
    outputs: list[str],
) -> None:
    display, before = Display(DisplayConfig(agree=2), Bytes()), ""
    for output in outputs:
        text = display.show(list(output.encode()), final=False).shown
        assert len(text) >= shared(before, output)
        before = text


def test_a_long_thought_is_read_a_few_times() -> None:
    read: list[int] = []

    class Letters:
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
            read.append(len(tokens))
            return "".join(map(chr, tokens))

    thought = f"\n<think>{'Hm. ' * 500}</think>\n "
    for text, answer in (
        (f"{thought}The cat.", "The cat."),
        (thought, ""),
        ("The cat.", "The cat."),
    ):
        assert without_thoughts([*map(ord, text)], Letters()) == tuple(map(ord, answer))
    assert sum(read) < 30 * len(thought)
