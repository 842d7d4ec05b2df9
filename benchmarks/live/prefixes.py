"""What training on beginnings of sentences brings to live translation.

    python benchmarks/live/prefixes.py [--steps 1500]

Goes on training the shipped small model twice, for the same number of steps: on whole sentence
pairs, and on pairs mixed with beginnings of them (half and half). Both, and the model as it is,
then translate the same streams: Tatoeba test sentences, three at a time, and FLORES sentences, as
they grow by three words. Reads ../shared/data/parallel. Writes
benchmarks/results/live_prefixes.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what the shipped models were made of

import numpy as np

from draftsmith.commands.live import replay
from draftsmith.commands.live.replay import LiveReplayOptions
from draftsmith.commands.pretrain import PretrainOptions
from draftsmith.data.text import TextConfig
from draftsmith.distill.config import ArchitectureConfig, ScheduleConfig
from draftsmith.live.config import PromptConfig, RedraftConfig
from draftsmith.live.records import write_lines
from draftsmith.live.streams import make_stream, prefix_pairs
from draftsmith.provenance import (
    machine_summary,
    versions,
    write_json_atomic,
    write_text_atomic,
)
from draftsmith.targets.config import ModelConfig
from mini_code import train_missing
from mini_ende import CORPORA, HELD_OUT, MOST_JOINED, Pair, examples, read_pairs

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "parallel"
TARGET = ROOT / "models" / "mini-ende" / "target"
TEST = "tatoeba-test-v2021-08-07"
JOINED = 3


def write_examples(path: Path, pairs: Sequence[Pair], share: float) -> Path:
    """Examples of one or several sentences; `share` of them are beginnings of others."""
    if not path.exists():
        whole = list(examples(pairs, "German", passes=1, most=MOST_JOINED, seed=1))
        head = len("Translate to German: ")
        sides = [(one["prompt"][head:-1], one["completion"]) for one in whole]
        made = prefix_pairs(sides, share, seed=1)
        order = np.random.Generator(np.random.PCG64(2)).permutation(len(made))
        lines = (
            {"prompt": f"Translate to German: {made[i][0]}\n", "completion": made[i][1]}
            for i in order
        )
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_text_atomic(path, text)
    return path


def training(work: Path, name: str, share: float, steps: int) -> PretrainOptions:
    """The shipped model's measures and weights, other examples."""
    kept = [p for p in read_pairs(DATA / "en-de.train.tsv.xz", CORPORA) if p.key >= HELD_OUT]
    data = TextConfig(text=(str(write_examples(work / f"{name}.jsonl", kept, share)),))
    return PretrainOptions(
        data=data,
        model=ArchitectureConfig(
            size="8m",
            kv_heads=2,
            context=1024,
            tokenizer=str(TARGET),
            init=f"subclone:{TARGET}",
        ),
        training=ScheduleConfig(
            duration=f"{steps}steps",
            block_length=256,
            batch_tokens=2048,
            learning_rate=5e-4,
            min_learning_rate=1e-5,
            warmup=50,
            schedule="linear",
        ),
        out=work / name,
        save_every=100,
    )


def streams(work: Path, limit: int) -> dict[str, Path]:
    """Files of growing sources with references."""
    flores = [
        (DATA / "flores200" / f"{name}.devtest").read_text(encoding="utf-8").splitlines()[:limit]
        for name in ("eng_Latn", "deu_Latn")
    ]
    everyday = []
    for side in ("eng", "deu"):
        lines = lzma.decompress((DATA / f"{TEST}.{side}.xz").read_bytes()).decode().splitlines()
        some = lines[: JOINED * limit]
        everyday.append([" ".join(some[i : i + JOINED]) for i in range(0, len(some), JOINED)])
    found = {}
    for name, (sources, references) in (("FLORES", flores), ("Tatoeba", everyday)):
        found[name] = work / f"{name}.stream.jsonl"
        write_lines(found[name], make_stream(sources, references, lag=3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--limit", type=int, default=100, help="segments of each stream")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "live_prefixes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    shares = {"whole": 0.0, "beginnings": 0.5}
    train_missing(training(given.work, name, share, given.steps) for name, share in shares.items())
    models = {"shipped": TARGET, **{name: given.work / name for name in shares}}
    rows: list[dict[str, Any]] = []
    for text, stream in streams(given.work, given.limit).items():
        for name, model in models.items():
            options = LiveReplayOptions(
                stream=stream,
                model=ModelConfig(target=str(model), dtype="float32"),
                bias="0,0.2",
                mask_k="0,5",
                prompt=PromptConfig(language="German"),
                redraft=RedraftConfig(),
                out=given.work / f"replay-{text}-{name}",
            )
            found = replay.run(options)["rows"]
            rows += [{"model": name, "text": text, **row} for row in found]
    for row in rows:
        ad = "" if row["ad"] is None else f"{row['ad']:.1%}"
        bias = "AR" if row["bias"] is None else f"{row['bias']:g}"
        print(
            f"{row['text']:<8} {row['model']:<11} {bias:>4}  {row['mask_k']} hidden  "
            f"NE {row['ne']:.2f}  A/D {ad:>6}  "
            f"speed-up {row['speedup']:.2f}  chrF {row['chrf']:.1f}"
        )
    facts = {"steps": given.steps, "segments": given.limit, "rows": rows}
    write_json_atomic(
        given.out / "live_prefixes.json",
        {**facts, "versions": versions(), "machine": machine_summary()},
    )


if __name__ == "__main__":
    main()
