"""The study of drafters over hidden states, beside those without any, on one target:

    python benchmarks/drafters/study.py                             # models/mini-code
    python benchmarks/drafters/study.py --models models/mini-ende
    python benchmarks/drafters/study.py --only methods --timed      # speed-ups; the machine is idle
    python benchmarks/drafters/study.py --only methods --seeds 1    # drafters-MODEL-seeds-1.json
    python benchmarks/drafters/study.py --models models/mini-ende --only combination \
        --chosen "FSPAD + LK, draws-4"                              # what another target chose

| part          | what varies                                                            | seeds |
|---------------|------------------------------------------------------------------------|-------|
| `methods`     | PLD, Lookahead, SpS, Medusa, EAGLE-1 to 3, FSPAD, HASS, GRIFFIN        | 3     |
| `rates`       | learning rates of the trained ones                                     | 1     |
| `combination` | FSPAD's and GRIFFIN's networks: objectives on greedy, drawn and        | 1     |
|               | beam-searched texts; the best on prompts that it was not chosen by     | 3     |
| `stages`      | GRIFFIN and HASS with forwards that grow in stages, as many steps      | 3     |
| `ablations`   | what GRIFFIN is made of, its mask; training forwards, also of HASS     | 3; 1  |
| `longer`      | GRIFFIN, HASS, FSPAD, EAGLE-2 with four times the steps                | 1     |

All trained drafters see equal prompts and equally many tokens, in one stage but for `stages`. An
interrupted study continues when repeated; parts come in the order of their weight. `--timed` times
the drafters of `methods` and the best of `combination` one after the other. Writes
benchmarks/results/drafters-MODEL.json, .md and drafters-MODEL/ (figures).

On two idle cores mini-code takes about two and a half hours, of which `methods` takes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distillation"))

from evaluation import loop_shares
from study import Models
from writing import places

from drafters.parts import COMBINED, PARTS, to_time
from drafters.pictures import save_pictures
from drafters.runs import BATCH_TOKENS, LEARNING_RATE, SUBJECTS, Amounts, Lab
from drafters.tables import write
from drafters.timing import timed
from draftsmith.provenance import (
    machine_summary,
    versions,
    write_json_atomic,
    write_text_atomic,
)
from draftsmith.targets.hf import quieten

ROOT = Path(__file__).resolve().parents[2]
FULL = Amounts(
    prompts=600,
    choosing_prompts=12,
    final_prompts=32,
    exam_tokens=64,
    steps=256,
    seeds=3,
    timed_prompts=8,
    timed_repeats=2,
)
QUICK = Amounts(
    prompts=8,
    choosing_prompts=2,
    final_prompts=2,
    exam_tokens=8,
    steps=4,
    seeds=2,
    timed_prompts=1,
    timed_repeats=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=ROOT / "models" / "mini-code")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--chosen", choices=COMBINED, metavar="LABEL", help="in `combination`")
    parser.add_argument("--seeds", type=int, default=FULL.seeds, help="of settings with several")
    parser.add_argument("--timed", action="store_true", help="speed-ups too; the machine is idle")
    parser.add_argument("--work", type=Path, help="left out: runs/drafters-MODEL")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    unknown = set(given.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only knows {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    if given.models.name not in SUBJECTS:
        parser.error(f"--models knows {', '.join(SUBJECTS)}; got {given.models}")
    if given.chosen and "combination" not in given.only.split(","):
        parser.error("--chosen says what `combination` shows: name that part in --only, too")
    if given.seeds < 1:
        parser.error(f"--seeds is at least 1; got {given.seeds}")
    fewer = "" if given.seeds == FULL.seeds else f"-seeds-{given.seeds}"
    name = f"drafters-{given.models.name}{fewer}"
    work, out = places(given.work or ROOT / "runs" / name, given.out, quick=given.quick)
    lab = Lab(
        models=Models(folder=given.models),
        work=work,
        amounts=QUICK if given.quick else replace(FULL, seeds=given.seeds),
        workers=given.workers,
        chosen=given.chosen,
    )
    path = out / f"{name}.json"
    quieten()
    record = begin(lab, path)
    record["loop_share"] = loop_shares(lab.final)
    if given.chosen and record.get("combination", {}).get("grid"):
        parser.error(f"{path} has a grid that chose its own best: leave --chosen out")
    for part, run in PARTS.items():
        if part in given.only.split(","):
            record[part] = run(lab)
            finish(record, path)
    if given.timed:
        record["timed"] = timed(lab, to_time(lab, record))
        finish(record, path)


def begin(lab: Lab, path: Path) -> dict[str, Any]:
    """What is known of the study, parts of earlier calls included, if they had these amounts."""
    facts = {
        "model": lab.models.folder.name,
        "amounts": asdict(lab.amounts),
        "tokens_per_step": BATCH_TOKENS,
        "learning_rate": LEARNING_RATE,
    }
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {**known, **facts} if facts.items() <= known.items() else facts


def finish(record: dict[str, Any], path: Path) -> None:
    """Write everything that is known by now."""
    record |= {"versions": versions(), "machine": machine_summary()}
    write_json_atomic(path, record)
    write_text_atomic(path.with_suffix(".md"), write(record))
    save_pictures(record, path.with_suffix(""))


if __name__ == "__main__":
    main()
