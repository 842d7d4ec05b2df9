"""Live translation of FLORES-200 devtest, English -> German, in streams that grow by three words.

    python benchmarks/live/flores.py [--limit 100]
    python benchmarks/live/flores.py --target runs/live_prefixes/beginnings --name live_beginnings

The paper's tables (SSBD, arXiv 2509.21740) with the shipped small model, which knows everyday
sentences and software texts: news are beyond it, and its chrF says so. What is compared holds
nevertheless: the same sources, prompts and cache with and without drafts, by bias and mask (hidden,
or not drafted either), with 95 % intervals by bootstrap over sentences; COMET is not run. Also a
stream in which a fifth of the hypotheses come first with wrong last words. Then
drafting on behind a divergence: from the old tail, by prompt lookup, with the shipped draft model.
`--target` takes another model, such as the one that prefixes.py trains on beginnings of sentences.
Reads ../shared/data/parallel. Nothing else should run meanwhile. Writes
benchmarks/results/NAME.json and NAME/ (live_flores).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from draftsmith.commands.live import replay
from draftsmith.commands.live.replay import LiveReplayOptions
from draftsmith.live import plots
from draftsmith.live.config import PromptConfig, RedraftConfig
from draftsmith.live.records import write_lines
from draftsmith.live.replay import ReplayRow
from draftsmith.live.streams import make_stream
from draftsmith.provenance import machine_summary, versions, write_json_atomic
from draftsmith.targets.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
Mask = Literal["display", "draft"]
DATA = ROOT.parent / "shared" / "data" / "parallel" / "flores200"
MODELS = ROOT / "models" / "mini-ende"
REWRITES = 0.2
BEHIND = {
    "decode on": RedraftConfig(),
    "old tail": RedraftConfig(resync=8),
    "prompt lookup": RedraftConfig(then="prompt_lookup"),
    "draft model": RedraftConfig(then=str(MODELS / "draft")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=100, help="sentences")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--target", type=Path, default=MODELS / "target")
    parser.add_argument("--name", default="live_flores", help="of the results")
    parser.add_argument("--work", type=Path, help="left out: runs/NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    sides = [
        (DATA / f"{name}.devtest").read_text(encoding="utf-8").splitlines()[: given.limit]
        for name in ("eng_Latn", "deu_Latn")
    ]
    work = given.work or ROOT / "runs" / given.name
    work.mkdir(parents=True, exist_ok=True)
    stream = work / "stream.jsonl"
    write_lines(stream, make_stream(sides[0], sides[1], lag=3))
    rewriting = work / "rewriting.jsonl"
    write_lines(rewriting, make_stream(sides[0], sides[1], lag=3, rewrites=REWRITES))
    model = ModelConfig(target=str(given.target), dtype=given.dtype)

    def replayed(
        name: str,
        bias: str,
        masks: str,
        redraft: RedraftConfig,
        mask: Mask = "display",
        *,
        of: Path = stream,
    ) -> list[ReplayRow]:
        options = LiveReplayOptions(
            stream=of,
            model=model,
            bias=bias,
            mask_k=masks,
            mask=mask,
            prompt=PromptConfig(language="German"),
            redraft=redraft,
            out=work / name,
        )
        return [ReplayRow(**row) for row in replay.run(options)["rows"]]

    rows = replayed("paper", "0,0.1,0.2,0.3,0.4,0.5,1", "0,3,5", RedraftConfig())
    # the paper's mask: what is hidden is not drafted either
    trimmed = replayed("trimmed", "0,0.2,0.5,1", "3,5", RedraftConfig(), "draft")
    rows += [row for row in trimmed if row.method == "ssbd"]
    rewritten = replayed("rewriting", "0,0.2,0.5", "0", RedraftConfig(), of=rewriting)
    behind = {
        name: next(row for row in replayed(name.replace(" ", "-"), "0.2", "0", way) if row.bias)
        for name, way in BEHIND.items()
    }
    folder = given.out / given.name
    folder.mkdir(parents=True, exist_ok=True)
    plots.save(rows, folder)
    below = "NE in characters unless flores101's pieces are there; COMET was not run.\n"
    wrong = f"With wrong last words before {REWRITES:.0%} of the hypotheses that are not final:"
    parts = (plots.markdown(rows), wrong, plots.markdown(rewritten), below)
    (folder / "tables.md").write_text("\n".join(f"{part}\n" for part in parts), encoding="utf-8")
    as_dict = {
        "rows": [asdict(row) for row in rows],
        "rewrites": REWRITES,
        "rewriting": [asdict(row) for row in rewritten],
        "behind": {name: asdict(row) for name, row in behind.items()},
    }
    facts = {"model": given.target.name, "sentences": given.limit, "dtype": given.dtype}
    write_json_atomic(
        given.out / f"{given.name}.json",
        {**facts, **as_dict, "versions": versions(), "machine": machine_summary()},
    )
    for name, row in behind.items():
        print(f"{name:<14} speed-up {row.speedup:.2f}  NE {row.ne:.2f}  chrF {row.chrf:.1f}")


if __name__ == "__main__":
    main()
