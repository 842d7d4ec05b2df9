"""chrF, BLEU and COMET of final texts. sacrebleu and COMET may be missing."""

from __future__ import annotations

import sys
from math import exp
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftsmith.errors import InputError
from draftsmith.live.metrics import (
    COMET_MODEL,
    Quality,
    Translation,
    bleu_tokenizer,
    comet,
    quality,
    translations,
    write_texts,
)
from draftsmith.live.records import UpdateRecord


def record(seg: int, rev: int, full: str, **values) -> UpdateRecord:
    known = {"source": "s", "shown": full, "tokens": 0, "drafted": 0, "accepted": 0}
    known |= {"final": False, "reference": None}
    return UpdateRecord(seg=seg, rev=rev, full=full, **(known | values))


def pair(text: str, reference: str) -> Translation:
    return Translation(source="s", text=text, reference=reference)


def scores(*pairs: tuple[str, str], language: str = "en") -> Quality:
    """Scores of segments with these (text, reference)."""
    records = [
        record(seg, 0, text, final=True, reference=reference)
        for seg, (text, reference) in enumerate(pairs)
    ]
    found = quality(records, target_language=language)
    assert found is not None
    return found


# --------------------------------------------------------------------------- what is scored


def test_each_segment_counts_once_with_its_last_whole_output() -> None:
    records = [
        record(0, 0, "wrong", source="a", reference="r"),
        record(0, 1, "whole", source="a b", shown="who", final=True, reference="r"),
        record(1, 0, "open tail", source="c", shown="open", reference="q"),
    ]
    assert translations(records) == [
        Translation(source="a b", text="whole", reference="r"),
        Translation(source="c", text="open tail", reference="q"),
    ]


def test_after_a_degenerate_end_what_is_still_shown_counts() -> None:
    records = [
        record(0, 0, "good", reference="r"),
        record(0, 1, "la la la la", shown="good", degenerate=True, final=True, reference="r"),
    ]
    assert translations(records) == [pair("good", "r")]


def test_an_empty_output_stays_and_an_empty_source_is_the_one_before() -> None:
    records = [
        record(0, 0, "x", source="a b", reference="r"),
        record(0, 1, "", source=" ", final=True, reference="r"),
    ]
    assert translations(records) == [Translation(source="a b", text="", reference="r")]


def test_without_references_there_is_no_score_and_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("sacrebleu", "sacrebleu.metrics", "comet"):
        monkeypatch.setitem(sys.modules, package, None)
    records = [record(0, 0, "x", final=True), record(1, 0, "y", final=True, reference="")]
    assert quality(records, target_language="de") is None
    assert translations(records) == []


def test_segments_without_a_reference_are_left_out_and_counted() -> None:
    pytest.importorskip("sacrebleu")
    both = [
        record(0, 0, "the cat sat on the mat", final=True, reference="the cat sat on the mat"),
        record(1, 0, "something else", final=True),
    ]
    found = quality(both, target_language="en")
    assert found is not None
    assert (found.scored, found.without_reference) == (1, 1)
    assert (found.chrf.value, found.bleu.value) == pytest.approx((100, 100))


# --------------------------------------------------------------------------- chrF and BLEU


def test_chrf_is_that_of_its_definition() -> None:
    """`ab` for `abc`: orders 1 and 2 have precision 1, and recall 2/3 and 1/2, mean 7/12.

    F of beta 2 is 5 P R / (4 P + R): 5 (7/12) / (4 + 7/12) = 35/55.
    """
    pytest.importorskip("sacrebleu")
    found = scores(("ab", "abc")).chrf
    assert found.value == pytest.approx(100 * 35 / 55)
    assert {"nc:6", "nw:0", "nrefs:1", "case:mixed"} <= set(found.signature.split("|"))


def test_bleu_is_that_of_its_definition() -> None:
    """All n-grams are right, and 6 words stand for 7: only the brevity penalty is left."""
    pytest.importorskip("sacrebleu")
    found = scores(("the cat sat on the mat", "the cat sat on the mat now")).bleu
    assert found.value == pytest.approx(100 * exp(1 - 7 / 6))
    assert {"tok:13a", "nrefs:1", "case:mixed"} <= set(found.signature.split("|"))


def test_scores_are_of_the_corpus_not_means_of_segments() -> None:
    pytest.importorskip("sacrebleu")
    good, bad = ("the cat sat on the mat", "the cat sat on the mat"), ("x", "one two")
    both = scores(good, bad).bleu.value
    # 7 words for 8; right are 6 of 7, and all 5, 4 and 3 longer n-grams
    assert both == pytest.approx(100 * exp(1 - 8 / 7) * (6 / 7) ** 0.25)
    assert both != pytest.approx(sum(scores(one).bleu.value for one in (good, bad)) / 2)


def test_chinese_is_cut_into_characters_and_not_at_blanks() -> None:
    pytest.importorskip("sacrebleu")
    pair = ("这是一个例子。", "这是一个好例子。")
    found = scores(pair, language="zh-CN").bleu
    assert "tok:zh" in found.signature.split("|")
    assert scores(pair, language="de").bleu.value == 0  # one word, and a wrong one
    assert found.value > 30


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        *[("de", "13a"), ("DE-at", "13a"), ("German", "13a"), ("", "13a"), ("zhuang", "13a")],
        *[("zh", "zh"), ("zh_Hans", "zh"), ("zho_Hant", "zh"), ("cmn", "zh"), (" Chinese ", "zh")],
    ],
)
def test_the_tokenizer_of_bleu_follows_the_language(language: str, tokenizer: str) -> None:
    assert bleu_tokenizer(language) == tokenizer


def test_japanese_takes_mecab_where_it_is_and_says_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"MeCab", "ipadic"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    for language in ("ja", "jpn_Jpan", "Japanese"):
        assert bleu_tokenizer(language) == "ja-mecab"
    there.remove("ipadic")  # sacrebleu's tokenizer needs both
    assert bleu_tokenizer("ja") == "char"
    pytest.importorskip("sacrebleu")
    found = scores(("これは例です", "これは例です"), language="ja").bleu
    assert "tok:char" in found.signature.split("|")
    assert found.value == pytest.approx(100)


def test_without_sacrebleu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(InputError, match=r"draftsmith\[eval\]"):
        scores(("a", "b"))


# --------------------------------------------------------------------------- COMET


class FakeComet:
    """A package whose score is the share of texts that equal their references."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bool]] = []
        self.data: list[dict[str, str]] = []

    def load_from_checkpoint(self, path: str, *, local_files_only: bool) -> FakeComet:
        self.loaded.append((path, local_files_only))
        return self

    def predict(self, data: list[dict[str, str]], *, gpus: int, progress_bar: bool) -> object:
        assert (gpus, progress_bar) == (0, False)
        self.data = data
        return SimpleNamespace(system_score=sum(d["mt"] == d["ref"] for d in data) / len(data))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeComet:
    fake = FakeComet()
    monkeypatch.setitem(sys.modules, "comet", fake)
    return fake


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint in the model cache; nothing is downloaded."""

    def snapshot(name: str, *, local_files_only: bool) -> str:
        assert (name, local_files_only) == (COMET_MODEL, True)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    path = tmp_path / "checkpoints" / "model.ckpt"
    path.parent.mkdir()
    path.touch()
    return path


def test_comet_scores_source_text_and_reference_without_a_download(
    package: FakeComet, cached: Path
) -> None:
    found = comet([pair("a", "a"), pair("b", "c")])
    assert found.value == 0.5
    assert found.signature.startswith("comet:wmt22-comet-da|")
    assert package.loaded == [(str(cached), True)]
    assert package.data[1] == {"src": "s", "mt": "b", "ref": "c"}


def test_comet_says_what_is_missing_in_the_model_cache(
    package: FakeComet, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: str, local_files_only: bool) -> str:
        raise FileNotFoundError("nothing cached")

    with monkeypatch.context() as patch:
        patch.setattr(package, "load_from_checkpoint", missing)
        with pytest.raises(InputError, match="xlm-roberta-large"):
            comet([pair("a", "b")])
    cached.unlink()  # a download that was cut short
    with pytest.raises(InputError, match=r"model\.ckpt"):
        comet([pair("a", "b")])
    monkeypatch.setattr("huggingface_hub.snapshot_download", missing)
    with pytest.raises(InputError, match="wmt22-comet-da"):
        comet([pair("a", "b")])
    assert package.loaded == []


def test_without_comet_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(InputError, match="unbabel-comet"):
        comet([pair("a", "b")])


def test_texts_for_other_tools_stay_line_by_line(tmp_path: Path) -> None:
    write_texts([pair("a\nb", "c"), pair("", "d\N{LINE SEPARATOR}e")], tmp_path)
    assert (tmp_path / "source.txt").read_text(encoding="utf-8") == "s\ns\n"
    assert (tmp_path / "translation.txt").read_text(encoding="utf-8") == "a b\n\n"
    assert (tmp_path / "reference.txt").read_text(encoding="utf-8") == "c\nd e\n"
