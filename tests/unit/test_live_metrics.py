"""Erasure, acceptance and speed of live translations, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.errors import InputError
from draftsmith.live.metrics import (
    CHARACTERS,
    WORDS,
    Pieces,
    Spread,
    decode_tokens_per_second,
    erasure,
    flores_pieces,
    report,
    speedup,
    tokens_per_second,
    verification_cost,
)
from draftsmith.live.records import UpdateRecord, segments

# Table 1 of SSBD (arXiv 2509.21740), its target side.
TABLE_1 = [
    "C'est",
    "C'est un exemple",
    "C'est un exemple d'auto-spéculation",
    "C'est un exemple de décodage auto-spéculatif.",
]
MODEL_FILE = "sacrebleu_tokenizer_spm.model"


def record(seg: int = 0, rev: int = 0, shown: str = "", **values) -> UpdateRecord:
    """One with the fields that matter to a test."""
    known = {"source": "s", "full": shown, "final": False, "tokens": 0, "drafted": 0, "accepted": 0}
    return UpdateRecord(seg=seg, rev=rev, shown=shown, **(known | values))


def segment(shown: Sequence[str], seg: int = 0) -> list[UpdateRecord]:
    last = len(shown) - 1
    return [record(seg, rev, text, final=rev == last) for rev, text in enumerate(shown)]


def erasure_of(shown: Sequence[str], pieces: Pieces) -> float | None:
    """NE of one segment."""
    return report(segment(shown), pieces).erasure_macro


# --------------------------------------------------------------------------- erasure


@pytest.mark.parametrize(
    ("before", "after", "erased"),
    [
        ("", "a b", 0),
        ("a b", "a b", 0),
        ("a b", "a b c", 0),
        ("a b c", "a b", 1),
        ("a b c", "a x c", 2),  # c came back, but behind a change: readers start again at x
        ("a b c", "x a b c", 3),
        ("a b", "", 2),
        ("a b", "A b", 2),
    ],
)
def test_erasure_counts_all_behind_the_first_change(before: str, after: str, erased: int) -> None:
    assert erasure(before.split(), after.split()) == erased


@given(st.lists(st.sampled_from("ab"), max_size=6), st.lists(st.sampled_from("ab"), max_size=6))
def test_what_is_left_after_erasure_is_the_longest_common_beginning(
    before: list[str], after: list[str]
) -> None:
    left = len(before) - erasure(before, after)
    assert before[:left] == after[:left]
    assert before[: left + 1] != after[: left + 1] or left == min(len(before), len(after))


def test_the_papers_example_stream_erases_one_word_of_six() -> None:
    # d'auto-spéculation goes; the last text is: C'est un exemple de décodage auto-spéculatif.
    assert erasure_of(TABLE_1, WORDS) == pytest.approx(1 / 6)
    # In characters, `'auto-spéculation` goes, the d stays: 17 of the last text's 45.
    assert len("'auto-spéculation") == 17
    assert len(TABLE_1[-1]) == 45
    assert erasure_of(TABLE_1, CHARACTERS) == pytest.approx(17 / 45)


def test_the_denominator_is_the_final_text_not_the_updates_nor_the_longest_text() -> None:
    shown = ["a b c d", "x", "x", "x y"]  # 4 erased; 2 pieces in the end
    assert erasure_of(shown, WORDS) == 4 / 2
    assert 4 / 2 not in (4 / len(shown), 4 / 3, 4 / 4)  # updates, transitions, longest text
    # showing the same again costs nothing and excuses nothing
    assert erasure_of([*shown, "x y", "x y"], WORDS) == 4 / 2


def test_only_what_was_shown_counts() -> None:
    hidden = [
        record(0, 0, "a", full="a b c"),
        record(0, 1, "a x", full="a x y z"),
        record(0, 2, "a x q", full="a x q", final=True),
    ]
    assert report(hidden, WORDS).erasure_micro == 0


def test_macro_is_the_mean_of_segments_and_micro_the_ratio_of_sums() -> None:
    # segment 0: 1 erased of 1; segment 1: 1 erased of 4
    stream = [*segment(["a", "b"], 0), *segment(["a b", "a c d e"], 1)]
    found = report(stream, WORDS)
    assert found.erasure_macro == pytest.approx((1 / 1 + 1 / 4) / 2)
    assert found.erasure_micro == pytest.approx((1 + 1) / (1 + 4))


def test_a_segment_that_ends_empty_is_counted_and_in_no_erasure() -> None:
    one = segment(["a", "b"], 0)
    both = [*one, *segment(["a b c", " "], 1)]
    found = report(both, WORDS)
    assert found.empty_finals == 1
    assert (found.erasure_macro, found.erasure_micro) == (1, 1)
    alone = report(segment(["a", ""]), WORDS)
    assert (alone.empty_finals, alone.erasure_macro, alone.erasure_micro) == (1, None, None)
    assert report([], WORDS).erasure_macro is None


def test_a_new_segment_erases_nothing_of_the_one_before() -> None:
    stream = [*segment(["a b"], 0), *segment(["c d"], 1)]
    assert report(stream, WORDS).erasure_micro == 0


def test_texts_are_not_normalised() -> None:
    composed, decomposed = "\N{LATIN SMALL LETTER E WITH ACUTE}", "e\N{COMBINING ACUTE ACCENT}"
    assert erasure_of([composed, decomposed], CHARACTERS) == 1 / 2


@given(st.lists(st.text(alphabet="ab ", max_size=8), min_size=1, max_size=6))
def test_an_append_only_stream_has_no_erasure(chunks: list[str]) -> None:
    shown = ["".join(chunks[: i + 1]) for i in range(len(chunks))]
    assert erasure_of(shown, CHARACTERS) in (0, None)


# --------------------------------------------------------------------------- acceptance and speed


def trace() -> list[UpdateRecord]:
    """A scripted stream: sums are 20 tokens, 10 drafted, 6 accepted, 4 and 3 redrafted."""
    return [
        record(
            0, 0, "a", tokens=4, forwards=5, fed=8, seconds=0.5, first_seconds=0.1, degenerate=True
        ),
        record(
            0, 1, "b", tokens=6, drafted=4, accepted=1, forwards=6, seconds=0.6, first_seconds=0.1
        ),
        record(
            0,
            2,
            "b c",
            final=True,
            tokens=10,
            drafted=6,
            accepted=5,
            redrafted=4,
            reaccepted=3,
            forwards=3,
            fed=9,
            seconds=0.9,
            first_seconds=0.3,
        ),
    ]


def test_acceptance_is_over_all_updates_together() -> None:
    found = report(trace(), WORDS)
    assert found.accepted_of_drafted == 6 / 10
    assert found.accepted_of_tokens == 6 / 20
    means = (0 / 1 + 1 / 4 + 5 / 6) / 3, (0 / 4 + 1 / 6 + 5 / 10) / 3
    assert (found.accepted_of_drafted, found.accepted_of_tokens) != pytest.approx(means)
    # what was offered again is in neither
    assert found.reaccepted_of_redrafted == 3 / 4
    assert (found.drafted, found.accepted, found.redrafted, found.reaccepted) == (10, 6, 4, 3)
    # the papers' tables hang together by this
    drafted_of_tokens = found.accepted_of_tokens / found.accepted_of_drafted
    assert drafted_of_tokens == pytest.approx(found.drafted / found.tokens)


def test_pace_over_everything_and_behind_the_first_forwards() -> None:
    found = report(trace(), WORDS)
    assert found.tokens_per_second == pytest.approx(20 / 2.0)
    # behind the first forward: 4-0-1, 6-1-1, 10-5-1 tokens in .4, .5, .6 seconds
    assert found.decode_tokens_per_second == pytest.approx((3 + 4 + 4) / 1.5)
    assert (found.forwards, found.fed) == (14, 17)
    assert found.seconds == pytest.approx(2.0)


def test_plain_decoding_at_an_even_pace_shows_that_pace() -> None:
    """Prefill .4 s, then .1 s per forward: six tokens and the end are seven forwards."""
    one = record(tokens=6, forwards=7, seconds=0.4 + 6 * 0.1, first_seconds=0.4)
    # the forward that finds the end costs its time: 5 tokens in 6 forwards
    assert decode_tokens_per_second([one]) == pytest.approx(5 / 6 / 0.1)
    assert tokens_per_second([one]) == pytest.approx(6 / 1.0)


def test_updates_without_plain_decoding_do_not_change_its_pace() -> None:
    decoded = record(tokens=6, forwards=7, seconds=1.0, first_seconds=0.4)
    at_once = record(
        rev=1, tokens=9, drafted=9, accepted=9, forwards=1, seconds=0.3, first_seconds=0.2
    )
    untimed = record(rev=2, tokens=9, forwards=9, seconds=5.0)
    assert decode_tokens_per_second([at_once, untimed]) is None
    alone = decode_tokens_per_second([decoded])
    assert decode_tokens_per_second([decoded, at_once, untimed]) == alone


def test_update_times_leave_out_answers_that_were_known() -> None:
    times = [0.1, 0.2, 0.3, 0.4, 0.5]
    stream = [record(0, rev, seconds=one) for rev, one in enumerate([*times, 0.0, 0.0])]
    found = report(stream, WORDS).update_ms
    assert found is not None
    assert (found.p50, found.p95) == pytest.approx((300, 480))  # 400 + .8 of the way to 500
    assert report(stream[-2:], WORDS).update_ms is None
    assert Spread.of([7]) == Spread(p50=7, p95=7)


def test_what_has_no_denominator_is_none() -> None:
    for stream in ([], [record()]):
        found = report(stream, WORDS)
        for name in (
            "erasure_macro",
            "erasure_micro",
            "accepted_of_drafted",
            "accepted_of_tokens",
            "reaccepted_of_redrafted",
            "tokens_per_second",
            "decode_tokens_per_second",
            "update_ms",
        ):
            assert getattr(found, name) is None, name
    assert speedup([record()], [record(tokens=1, seconds=1.0)]) is None
    assert speedup([record(tokens=1, seconds=1.0)], [record()]) is None
    assert speedup([record(tokens=1, seconds=1.0)], [record(tokens=0, seconds=1.0)]) is None


def test_speedup_is_the_ratio_of_paces_also_when_the_texts_differ_in_length() -> None:
    fast = [record(0, 0, tokens=10, seconds=1.0), record(0, 1, tokens=20, seconds=1.0)]
    slow = [record(0, 0, tokens=12, seconds=2.0), record(0, 1, tokens=12, seconds=2.0)]
    assert speedup(fast, slow) == pytest.approx((30 / 2) / (24 / 4))
    assert speedup(slow, fast) == pytest.approx(1 / 2.5)
    assert speedup(fast, fast) == 1


@pytest.mark.parametrize(
    "other",
    [
        [record(0, 0)],
        [record(0, 0), record(0, 1), record(0, 2)],
        [record(0, 0), record(0, 2)],
        [record(0, 0), record(1, 1)],
        [record(0, 0), record(0, 1, source="another")],
    ],
)
def test_speedups_of_different_streams_are_refused(other: list[UpdateRecord]) -> None:
    with pytest.raises(InputError, match="compare"):
        speedup([record(0, 0), record(0, 1)], other)


@pytest.mark.parametrize(
    ("ratio", "accepted"),
    [
        # Tables 2 and 3 of SSBD: speed-up and A/O
        *[(1.50, 0.553), (1.69, 0.631), (1.46, 0.521), (1.53, 0.589), (1.42, 0.538)],
        *[(1.50, 0.566), (1.28, 0.485), (1.43, 0.518), (1.31, 0.425), (1.36, 0.485)],
        *[(1.39, 0.408), (1.33, 0.459), (1.26, 0.427), (1.35, 0.526), (1.42, 0.570)],
        *[(1.51, 0.614), (1.59, 0.674), (2.00, 0.775)],
    ],
)
def test_the_papers_speedups_leave_a_small_cost_of_verification(
    ratio: float, accepted: float
) -> None:
    assert 0.12 < verification_cost(ratio, accepted) < 0.31


def test_verification_cost_is_found_again_where_it_is_known() -> None:
    """100 tokens of .1 s each; with drafts 57 are accepted and .2 steps a token go elsewhere."""
    plain = [record(tokens=100, seconds=10.0)]
    drafted = [record(tokens=100, drafted=80, accepted=57, seconds=4.3 + 100 * 0.2 * 0.1)]
    ratio, accepted = speedup(drafted, plain), report(drafted, WORDS).accepted_of_tokens
    assert ratio is not None
    assert accepted is not None
    assert verification_cost(ratio, accepted) == pytest.approx(0.2)


# --------------------------------------------------------------------------- what else is counted


@pytest.mark.parametrize(
    ("shown", "freeze"),
    [
        (["a", "b", "c"], 0),
        (["a", "a", "b", "b", "b"], 2),
        (["", "", "a"], 2),  # nothing was there, and nothing came
        (["a", "b", "a", "b"], 0),
    ],
)
def test_the_longest_freeze_counts_updates_that_changed_nothing(
    shown: list[str], freeze: int
) -> None:
    assert report(segment(shown), WORDS).longest_freeze == freeze


def test_a_freeze_ends_with_its_segment() -> None:
    stream = [*segment(["a", "a", "a"], 0), *segment(["a", "a"], 1)]
    assert report(stream, WORDS).longest_freeze == 2


def test_updates_segments_and_oddities_are_counted() -> None:
    stream = [*segment(["a", "b"], 0), record(1, 0, "c"), record(1, 5, "c", degenerate=True)]
    found = report(stream, WORDS)
    assert (found.updates, found.segments, found.open_segments) == (4, 2, 1)
    assert found.degenerate == 1
    assert report(trace(), WORDS).degenerate == 1


def test_a_report_is_signed_with_its_pieces_and_becomes_json() -> None:
    halves = Pieces(name="halves", split=lambda text: [text[:1], text[1:]])
    found = report(trace(), halves)
    assert "erasure:halves" in found.signature.split("|")
    assert "corpus:macro+micro" in found.signature.split("|")
    assert found.signature != report(trace(), WORDS).signature
    assert json.loads(json.dumps(dataclasses.asdict(found)))["signature"] == found.signature


def test_records_are_parted_by_segment_in_order() -> None:
    stream = [*segment(["a", "b"], 0), *segment(["c"], 3)]
    assert segments(stream) == [stream[:2], stream[2:]]
    assert segments([]) == []


@pytest.mark.parametrize(
    "stream",
    [
        [record(0, 0), record(1, 0), record(0, 1)],
        [record(1, 0), record(0, 0)],
        [record(0, 1), record(0, 0)],
        [record(0, 0, final=True), record(0, 1)],
    ],
    ids=["comes back", "goes down", "revision goes down", "goes on after its end"],
)
def test_two_streams_in_one_list_are_refused(stream: list[UpdateRecord]) -> None:
    with pytest.raises(InputError, match="segment"):
        report(stream, WORDS)


# --------------------------------------------------------------------------- flores pieces


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of sacrebleu, and no network."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("SACREBLEU", str(tmp_path))
    (tmp_path / "models").mkdir()
    return tmp_path


def test_without_the_model_file_pieces_are_characters_and_say_so(home: Path) -> None:
    assert flores_pieces() == CHARACTERS
    (home / "models" / MODEL_FILE).touch()  # what a failed fetch leaves
    assert flores_pieces() == CHARACTERS
    assert report(trace(), flores_pieces()).signature.startswith("erasure:char|")
    assert list(CHARACTERS.split("ab c")) == ["a", "b", " ", "c"]


def test_without_sentencepiece_pieces_are_characters(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "models" / MODEL_FILE).write_text("a model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert flores_pieces() == CHARACTERS


def test_the_folder_is_in_the_home_when_no_variable_names_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    processor = SimpleNamespace(Load=loaded.append, EncodeAsPieces=str.split)
    fake = SimpleNamespace(SentencePieceProcessor=lambda: processor)
    monkeypatch.setitem(sys.modules, "sentencepiece", fake)
    monkeypatch.delenv("SACREBLEU")
    monkeypatch.setattr(Path, "home", lambda: home)
    path = home / ".sacrebleu" / "models" / MODEL_FILE
    path.parent.mkdir(parents=True)
    path.write_text("a model")
    found = flores_pieces()
    assert (found.name, found.split("a b"), loaded) == ("flores101", ["a", "b"], [str(path)])


def test_pieces_are_those_of_sacrebleus_own_tokenizer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    theirs = pytest.importorskip("sacrebleu.tokenizers.tokenizer_spm")
    lines = home / "lines.txt"
    lines.write_text("this is an example of self-speculative decoding\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.Train(
        input=str(lines),
        model_prefix=str(home / "toy"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (home / "toy.model").rename(home / "models" / MODEL_FILE)
    monkeypatch.setattr(theirs, "SACREBLEU_DIR", str(home))
    found, wanted = flores_pieces(), theirs.TokenizerSPM("flores101")
    assert found.name == wanted.signature()
    for text in ("this is an example", "  exam ", ""):
        assert " ".join(found.split(text)) == wanted(text)


def test_a_broken_model_file_is_an_error_that_names_it(home: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = home / "models" / MODEL_FILE
    path.write_bytes(b"no model")
    with pytest.raises(InputError, match=MODEL_FILE):
        flores_pieces()
