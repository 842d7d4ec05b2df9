"""English sentences for the studies on `models/mini-ende`: what drafts learn from, and the exam.

Both are written once, as prompt files that `draftsmith collect` and `bench` read, too. Sentences
are joined, three by three in the exam, because one alone is over before drafting has begun.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what the shipped models were made of

import numpy as np

from draftsmith.provenance import write_text_atomic
from mini_ende import HELD_OUT, Pair, prompt, read_pairs

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models" / "mini-ende"
DATA = ROOT.parent / "shared" / "data" / "parallel"
TEST = "tatoeba-test-v2021-08-07"
JOINED = 3


def training_prompts(path: Path, count: int, *, seed: int = 0) -> Path:
    """Prompts like those of the exam, of sentences that the target was trained on: a draft model
    that learns from others forgets about these what it knew."""
    pairs = read_pairs(DATA / "en-de.train.tsv.xz", ("tatoeba",))
    kept = one_per_source(pair for pair in pairs if pair.key >= HELD_OUT)
    order = iter(np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(kept)))
    return write(path, [[kept[next(order)] for _ in range(JOINED)] for _ in range(count)])


def exam_prompts(path: Path, *, seed: int = 0) -> Path:
    """The Tatoeba test, three sentences at a time, in an order of its own."""
    sides = (
        lzma.decompress((DATA / f"{TEST}.{side}.xz").read_bytes()).decode().splitlines()
        for side in ("eng", "deu")
    )
    pairs = one_per_source(Pair(source=s, target=t) for s, t in zip(*sides, strict=True))
    order = np.random.Generator(np.random.PCG64([seed, 2])).permutation(len(pairs))
    full = len(pairs) // JOINED * JOINED
    return write(path, [[pairs[i] for i in some] for some in order[:full].reshape(-1, JOINED)])


def one_per_source(pairs: Iterable[Pair]) -> list[Pair]:
    """The first translation of every sentence."""
    found: dict[str, Pair] = {}
    for pair in pairs:
        found.setdefault(pair.source, pair)
    return list(found.values())


def write(path: Path, groups: Sequence[Sequence[Pair]]) -> Path:
    """A prompt file, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, "".join(_lines(groups)))
    return path


def _lines(groups: Iterable[Sequence[Pair]]) -> Iterator[str]:
    for number, group in enumerate(groups):
        line = {
            "id": f"{number:05}",
            "prompt": prompt("German", " ".join(pair.source for pair in group)),
            "reference": " ".join(pair.target for pair in group),
        }
        yield json.dumps(line, ensure_ascii=False) + "\n"
