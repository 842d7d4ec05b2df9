"""How well a translation model translates: BLEU and chrF of its greedy texts, by sacrebleu.

    python benchmarks/translation.py [MODEL] [--source FILE --reference FILE] [--language German]

Reads the Tatoeba test of ../shared/data unless other files (one sentence per line, also .xz) are
given. Writes benchmarks/results/translation.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sacrebleu

from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.data.text import read_text
from draftsmith.drafters.none import NoDrafter
from draftsmith.provenance import versions, write_json_atomic
from draftsmith.targets.hf import HFTarget, load_target
from mini_ende import prompt

ROOT = Path(__file__).resolve().parents[1]
TEST = ROOT.parent / "shared" / "data" / "parallel" / "tatoeba-test-v2021-08-07"


def translate(model: HFTarget, sentences: list[str], language: str, batch_size: int) -> list[str]:
    """Greedy translations, in order."""
    prompts = [
        model.tokenizer.encode(prompt(language, text), add_special_tokens=False)
        for text in sentences
    ]
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    out: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        options = DecodeOptions(max_new_tokens=32 + 3 * max(len(prompts[row]) for row in rows))
        for step in decode(model, NoDrafter(), [prompts[row] for row in rows], options):
            for row, new in zip(rows, step.emitted, strict=True):
                out[row].extend(new)
        print(f"\r{start + len(rows)}/{len(order)} sentences", end="", flush=True)
    print()
    return [model.tokenizer.decode(text, skip_special_tokens=True) for text in out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=str(ROOT / "models" / "mini-ende" / "target"))
    parser.add_argument("--source", type=Path, default=TEST.with_suffix(".eng.xz"))
    parser.add_argument("--reference", type=Path, default=TEST.with_suffix(".deu.xz"))
    parser.add_argument("--language", default="German")
    parser.add_argument("--limit", type=int, default=None, help="sentences; all when left out")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    sources = read_text(given.source).splitlines()[: given.limit]
    references = read_text(given.reference).splitlines()[: given.limit]
    said = translate(load_target(given.model), sources, given.language, given.batch_size)
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    scores = {
        "bleu": round(bleu.corpus_score(said, [references]).score, 2),
        "chrf": round(chrf.corpus_score(said, [references]).score, 2),
    }
    for source, text, reference in list(zip(sources, said, references, strict=True))[:5]:
        print(f"  {source}\n  {text}\n  ({reference})\n")
    print(f"BLEU {scores['bleu']}, chrF {scores['chrf']} on {len(said)} sentences")
    signatures = {"bleu": str(bleu.get_signature()), "chrf": str(chrf.get_signature())}
    write_json_atomic(
        given.out / "translation.json",
        {
            "model": Path(given.model).parent.name,
            "test": given.source.name,
            "sentences": len(said),
            **scores,
            "signatures": signatures,
            "versions": versions(),
        },
    )


if __name__ == "__main__":
    main()
