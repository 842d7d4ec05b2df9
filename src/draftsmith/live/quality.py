"""How good the final texts of a live translation are, against references.

Each segment counts once, with its whole last output: steadiness must not be bought with what is
said in the end. sacrebleu and COMET are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import InputError
from draftsmith.live.metrics import final_source, reference, segments
from draftsmith.live.records import UpdateRecord
from draftsmith.provenance import write_text_atomic

COMET_MODEL = "Unbabel/wmt22-comet-da"
_CHINESE = {"zh", "zho", "chi", "cmn", "chinese"}
_JAPANESE = {"ja", "jpn", "japanese"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A segment at its end."""

    source: str
    text: str
    reference: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A number and what it was measured with; only equal signatures compare."""

    value: float
    signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """Scores of the segments that have a reference; None when none has."""

    scored: int
    without_reference: int
    chrf: Score | None
    bleu: Score | None


def translations(records: Sequence[UpdateRecord]) -> list[Translation]:
    """The segments that have a reference, each with its last whole output.

    Where the last update was degenerate, the text that is still shown counts: it is what readers
    are left with. An empty output stays in, and costs what it should.

    Raises:
        InputError: the records are not those of one stream, in order.
    """
    found = []
    for part in segments(records):
        last = part[-1]
        wanted = reference(part)
        if wanted:
            text = last.shown if last.degenerate else last.full
            found.append(Translation(source=final_source(part), text=text, reference=wanted))
    return found


def quality(records: Sequence[UpdateRecord], *, target_language: str) -> Quality:
    """chrF and BLEU of one stream.

    Raises:
        InputError: sacrebleu is not installed, or the records are not those of one stream.
    """
    found = translations(records)
    return Quality(
        scored=len(found),
        without_reference=len(segments(records)) - len(found),
        chrf=chrf(found),
        bleu=bleu(found, target_language=target_language),
    )


def check_installed() -> None:
    """InputError when chrF and BLEU cannot be computed."""
    _sacrebleu()


def chrf(found: Sequence[Translation]) -> Score | None:
    """chrF2 of the corpus: character 6-grams, no words, beta 2. None without translations.

    Raises:
        InputError: sacrebleu is not installed.
    """
    return _corpus_score(_sacrebleu().CHRF(), found) if found else None


def bleu(found: Sequence[Translation], *, target_language: str) -> Score | None:
    """BLEU of the corpus, with `bleu_tokenizer`. None without translations.

    Raises:
        InputError: sacrebleu is not installed.
    """
    if not found:
        return None
    tokenizer = bleu_tokenizer(target_language)
    return _corpus_score(_sacrebleu().BLEU(tokenize=tokenizer), found)


def bleu_tokenizer(target_language: str) -> str:
    """sacrebleu's tokenizer for a language: `zh`, `ja-mecab` (`char` without MeCab), else `13a`.

    Languages are codes (zh, zh-CN, zho_Hans, ja, jpn_Jpan) or English names.
    """
    language = target_language.strip().lower().replace("_", "-").partition("-")[0]
    if language in _CHINESE:
        return "zh"
    if language in _JAPANESE:
        there = all(importlib.util.find_spec(name) for name in ("MeCab", "ipadic"))
        return "ja-mecab" if there else "char"
    return "13a"


def comet(found: Sequence[Translation], *, checkpoint: Path | None = None) -> Score | None:
    """Mean COMET of the segments, on the CPU. None without translations.

    Nothing is downloaded. `checkpoint` is a `model.ckpt` with its `hparams.yaml` one folder up, as
    COMET keeps them; None takes wmt22-comet-da from the model cache.

    Raises:
        InputError: unbabel-comet is not installed, or the checkpoint or its encoder is not there.
    """
    if not found:
        return None
    # as of 2.2.7 the package refuses the transformers that we need: a plain install would break us
    package = _import(
        "comet",
        "COMET",
        "it is the package unbabel-comet, made for transformers 4: install it in an environment of "
        "its own and run there, on the files of `write_texts`: comet-score -s source.txt "
        f"-t translation.txt -r reference.txt --model {COMET_MODEL}",
    )
    path = _cached_comet() if checkpoint is None else checkpoint
    if not path.is_file():
        raise InputError(
            f"the COMET checkpoint {path} is not there: give the model.ckpt of {COMET_MODEL}"
        )
    try:
        model = package.load_from_checkpoint(str(path), local_files_only=True)
    except OSError as error:
        raise InputError(
            f"the COMET checkpoint {path} cannot be loaded ({error}): its encoder must be in the "
            "model cache too, hf download FacebookAI/xlm-roberta-large for that of 2022"
        ) from None
    data = [{"src": one.source, "mt": one.text, "ref": one.reference} for one in found]
    scores = model.predict(data, gpus=0, progress_bar=False)
    name = COMET_MODEL.rpartition("/")[2] if checkpoint is None else str(checkpoint)
    return Score(value=float(scores.system_score), signature=f"comet:{name}|nrefs:1|corpus:mean")


def write_texts(found: Sequence[Translation], folder: Path) -> None:
    """source.txt, translation.txt and reference.txt, a line per segment, for other tools."""
    columns = {
        "source": [one.source for one in found],
        "translation": [one.text for one in found],
        "reference": [one.reference for one in found],
    }
    for name, texts in columns.items():
        # a line break inside a text would shift all that follows against the other files
        lines = (" ".join(text.splitlines()) for text in texts)
        write_text_atomic(folder / f"{name}.txt", "".join(f"{line}\n" for line in lines))


def _cached_comet() -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(COMET_MODEL, local_files_only=True)
    except FileNotFoundError:
        raise InputError(
            f"the COMET checkpoint {COMET_MODEL} is not in the model cache: hf download "
            f"{COMET_MODEL}, or give another checkpoint"
        ) from None
    return Path(folder) / "checkpoints" / "model.ckpt"


def _corpus_score(metric: Any, found: Iterable[Translation]) -> Score:
    texts, references = zip(*((one.text, one.reference) for one in found), strict=True)
    value = metric.corpus_score(texts, [references]).score
    # only now does the metric know its number of references
    return Score(value=float(value), signature=str(metric.get_signature()))


def _sacrebleu() -> Any:
    return _import("sacrebleu.metrics", "chrF and BLEU", 'pip install "draftsmith[eval]"')


def _import(module: str, what: str, how: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{what} cannot be imported ({error}): {how}") from None
