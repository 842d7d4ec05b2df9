"""The study of languages: one target English -> German, Chinese, Japanese, and drafts for it.

    python benchmarks/distillation/languages.py [--workers 2]

Trains the target and its draft first (an hour on two cores; neither is shipped, because most of the
corpora may not be passed on): those of `models/mini-ende` go on with the characters of the other
two languages as further tokens. Then distils the draft with each objective on greedy texts, eight
beams and four draws, and measures per language on FLORES-200 devtest: the best setting of each
language and its gain over the undistilled draft (DistillBeam, table 3; chosen by half of the
sentences, the gain is of the others), gains by script, morphology, region and family. Continues
when interrupted. Reads ../shared/data/parallel. Writes benchmarks/results/languages.json and
languages/. `--only greedy-tvd,draws-4-jsd` trains these settings alone and writes what they and the
undistilled draft are worth to languages-some.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ende
import numpy as np
import torch
from claims import Claim, judged
from evaluation import Evaluation, greedy_texts, loop_shares, quality
from lab import Amounts, Lab, keep, with_seed
from study import Evaluated, Models, Run
from writing import (
    Difference,
    as_row,
    difference,
    figures,
    places,
    plain,
    table,
    write_study,
)

import mini_ende
from draftsmith.bench.compare.model import RunMetrics
from draftsmith.core.types import TreeShape
from draftsmith.data.text import TextConfig
from draftsmith.provenance import (
    machine_summary,
    versions,
    write_json_atomic,
    write_text_atomic,
)
from draftsmith.targets.hf import load_model, load_target
from mini_code import train_missing
from mini_ende import Pair, examples, prompt, read_pairs

SIDES = {
    "German": ("de", "deu_Latn"),
    "Chinese": ("zh", "zho_Hans"),
    "Japanese": ("ja", "jpn_Jpan"),
}
"""Language: (of the training file, of the FLORES file)."""
CORPORA = (
    *("tatoeba", "gnome", "git_man", "multi30k", "opennmt10k", "alma_wmt17-20", "odashi_tanaka"),
    *(f"wmt_newstest20{year:02}" for year in (*range(9, 14), 15, 16)),
    *("wmt_news-test2008", "wmt_newssyscomb2009"),
)
OBJECTIVES = ("kl", "rkl", "jsd", "hellinger", "tvd", "tvdpp", "lk")
STORES = ("greedy", "beams-8", "draws-4")
FULL = Amounts(prompts=3000, exam_prompts=160, final_prompts=160, steps=480)
QUICK = Amounts(prompts=30, exam_prompts=4, final_prompts=4, steps=4)
PASSES = {"German": 1, "Chinese": 6, "Japanese": 2}
"""About as many examples of each."""
HELD_OUT = 0.002
MAX_NEW_TOKENS = 128
SEEDS = 3
STEPS = {"target": 2000, "draft": 1500}
QUICK_STEPS = 4
JOINED = {"German": 2, "Chinese": 2, "Japanese": 3}
"""Sentences of a training text, so that it is about as long as those of the exam."""
MOST_JOINED = {"German": mini_ende.MOST_JOINED, "Chinese": 2, "Japanese": mini_ende.MOST_JOINED}
"""Sentences of an example to pre-train on; those into Chinese are news, and more would not fit."""
EAST_ASIAN = ("\u2e80", "\uffef")
"""The first and the last character; of others the tokenizer of mini-ende has what is needed."""
SEEN = 5
"""How often a character is seen to become a token; others are bytes."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Pairs of one language, split by sentence."""

    language: str
    kept: list[Pair]
    held: list[Pair]


def corpora() -> list[Corpus]:
    out = []
    for language, (side, _) in SIDES.items():
        pairs = read_pairs(ende.DATA / f"en-{side}.train.tsv.xz", CORPORA)
        kept = [pair for pair in pairs if pair.key >= HELD_OUT]
        held = [pair for pair in pairs if pair.key < HELD_OUT]
        out.append(Corpus(language=language, kept=kept, held=held))
    return out


def train_models(work: Path, *, quick: bool) -> Path:
    """The target and its draft; the folder that holds both."""
    folder = work / "models"
    paths = [work / "train.jsonl", work / "held_out.jsonl"]
    beginnings = {name: work / "beginnings" / name for name in STEPS}
    if not all(path.exists() for path in beginnings.values()):
        work.mkdir(parents=True, exist_ok=True)
        found = corpora()
        write_text_atomic(paths[0], "".join(_lines(found, held=False)))
        write_text_atomic(paths[1], "".join(_lines(found, held=True)))
        for name, path in beginnings.items():
            if not path.exists():
                widen(ende.MODELS / name, characters(found), path)
    data = TextConfig(text=(str(paths[0]),), eval_text=(str(paths[1]),))
    recipes = {"target": mini_ende.target(folder, data), "draft": mini_ende.draft(folder, data)}
    train_missing(
        replace(
            recipe,
            model=replace(
                recipe.model,
                tokenizer=str(beginnings["target"]),
                init=f"subclone:{beginnings[name]}",
            ),
            training=replace(
                recipe.training, duration=f"{QUICK_STEPS if quick else STEPS[name]}steps"
            ),
        )
        for name, recipe in recipes.items()
    )
    return folder


def characters(found: Sequence[Corpus]) -> list[str]:
    """East Asian characters that are seen often enough, the most frequent first."""
    seen = Counter(letter for corpus in found for pair in corpus.kept for letter in pair.target)
    first, last = EAST_ASIAN
    return [letter for letter, n in seen.most_common() if n >= SEEN and first <= letter <= last]


def widen(source: Path, new: Sequence[str], out: Path) -> None:
    """A model that knows further tokens, with embeddings as a new model has them."""
    tokenizer = load_target(str(source)).tokenizer
    tokenizer.add_tokens(list(new))
    model = load_model(str(source), dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    half = out.with_name(f".{out.name}")
    model.save_pretrained(half)
    tokenizer.save_pretrained(half)
    half.rename(out)


def _lines(found: Sequence[Corpus], *, held: bool) -> Iterator[str]:
    """Examples of all languages, mixed."""
    made = [
        example
        for corpus in found
        for example in examples(
            corpus.held if held else corpus.kept,
            corpus.language,
            passes=1 if held else PASSES[corpus.language],
            most=MOST_JOINED[corpus.language],
            seed=0,
        )
    ]
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(made))
    return (json.dumps(made[i], ensure_ascii=False) + "\n" for i in order)


def learning_prompts(path: Path, count: int) -> Path:
    """Prompts of all languages, as many of each, with references; sentences are joined, because
    those of the exam are longer."""
    if not path.exists():
        rng = np.random.Generator(np.random.PCG64(3))
        lines = []
        for corpus in corpora():
            pairs = ende.one_per_source(corpus.kept)
            order = iter(rng.permutation(len(pairs)))
            for n in range(count // len(SIDES)):
                some = [pairs[next(order)] for _ in range(JOINED[corpus.language])]
                joined = Pair(
                    source=" ".join(pair.source for pair in some),
                    target=" ".join(pair.target for pair in some),
                )
                lines.append(_prompt(f"{corpus.language}-{n}", corpus.language, joined))
        write_text_atomic(path, "".join(lines[i] for i in rng.permutation(len(lines))))
    return path


def exam_of(lab: Lab, language: str) -> Evaluation:
    """FLORES sentences into this language."""
    path = lab.work / f"ask-{language}.jsonl"
    if not path.exists():
        sides = (
            (ende.DATA / "flores200" / f"{name}.devtest").read_text(encoding="utf-8").splitlines()
            for name in ("eng_Latn", SIDES[language][1])
        )
        pairs = [Pair(source=s, target=t) for s, t in zip(*sides, strict=True)]
        lines = (_prompt(f"{n:04}", language, pair) for n, pair in enumerate(pairs))
        write_text_atomic(path, "".join(lines))
    return replace(lab.exam, prompts=path, chains=(8,), tree=(), max_new_tokens=MAX_NEW_TOKENS)


def _prompt(name: str, language: str, pair: Pair) -> str:
    line = {
        "id": name,
        "prompt": prompt(language, pair.source),
        "reference": pair.target,
        "language": language,
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ende.ROOT / "runs" / "languages")
    parser.add_argument("--workers", type=int, default=2, help="runs side by side")
    parser.add_argument("--only", metavar="SETTINGS", help="STORE-OBJECTIVE, by commas")
    parser.add_argument("--quick", action="store_true", help="to see that it works; not to be kept")
    parser.add_argument("--out", type=Path, default=ende.ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    some = {f"{store}-{one}": (store, one) for one in OBJECTIVES for store in STORES}
    only = given.only.split(",") if given.only else []
    if unknown := set(only) - set(some):
        parser.error(f"--only knows {', '.join(some)}; got {', '.join(sorted(unknown))}")
    work, out = places(given.work, given.out, quick=given.quick)
    models = train_models(work, quick=given.quick)
    learn = learning_prompts(work / "learn.jsonl", FULL.prompts)
    amounts, both = QUICK if given.quick else FULL, Models(folder=models)
    lab = Lab(
        models=both,
        work=work,
        learn=learn,
        ask=learn,
        amounts=amounts,
        kept=keep(work if only else out / "languages", work, both, (learn,), amounts.prompts),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    if only:
        write_some(lab, [lab.run(*some[name]) for name in only], given.workers, out)
        return
    lab.cost_ratio()
    runs = [lab.models.base, *(lab.run(*name) for name in some.values())]
    done: dict[str, list[Evaluated]] = {}
    seeds: dict[str, list[Evaluated]] = {}
    for language in SIDES:
        exam = exam_of(lab, language)
        done[language] = lab.examine(runs, exam, given.workers)
        best = best_run(done[language])
        seeds[language] = lab.examine(
            [with_seed(best, seed) for seed in range(SEEDS)], exam, given.workers
        )
        write(lab, done, seeds, out)


def write_some(lab: Lab, runs: Sequence[Run], workers: int, out: Path) -> None:
    """What these and the undistilled draft are worth, and how much of it lies in loops."""
    facts: dict[str, Any] = {**asdict(lab.amounts), "models": STEPS, "languages": {}}
    for language in SIDES:
        exam = exam_of(lab, language)
        facts["languages"][language] = {
            "loop_share": loop_shares(exam),
            "drafts": table(lab.examine([lab.models.base, *runs], exam, workers)),
        }
        facts |= {"versions": versions(), "machine": machine_summary()}
        write_json_atomic(out / "languages-some.json", facts)


def write(
    lab: Lab,
    done: Mapping[str, Sequence[Evaluated]],
    seeds: Mapping[str, Sequence[Evaluated]],
    out: Path,
) -> None:
    """What is known so far. `done`: every setting in each language; `seeds`: of the best there."""
    shape = TreeShape.chain(8)
    rows: list[RunMetrics] = [
        replace(
            figures(
                as_row(one), shape, temperature, target="mini-endezhja", cost_ratio=lab.cost_ratio()
            ),
            language=language,
        )
        for temperature in (1.0, 0.0)
        for language, some in done.items()
        for one in some
    ]
    gains = {language: gain(some[0], seeds[language]) for language, some in done.items()}
    facts = {
        **asdict(lab.amounts),
        "of": lab.kept.of,
        "models": STEPS,
        "loop_share": {language: loop_shares(exam_of(lab, language)) for language in done},
        "best": dict(zip(gains, plain(list(gains.values())), strict=True)),
        "seeds": {language: table(some) for language, some in seeds.items()},
        "target": {language: of_target(exam_of(lab, language)) for language in done},
        "languages": {language: table(some) for language, some in done.items()},
        "claims": {
            language: judged(claims(lab), {one.run.name: one.marks for one in some})
            for language, some in done.items()
        },
    }
    for language, one in gains.items():
        print(
            f"{language}: {one.better} over {one.worse} {one.ratio - 1:+.1%} "
            f"({one.low - 1:+.1%} to {one.high - 1:+.1%})",
            file=sys.stderr,
        )
    write_study(out, "languages", rows, facts)


def claims(lab: Lab) -> list[Claim]:
    """Which texts teach more, over all divergences."""

    def on(store: str) -> tuple[Run, ...]:
        return tuple(lab.run(store, objective) for objective in OBJECTIVES)

    greedy, beams, draws = map(on, STORES)
    return [
        Claim(says="4 draws over greedy", better=draws, worse=greedy),
        Claim(says="8 beams over greedy", better=beams, worse=greedy),
        Claim(says="4 draws over 8 beams", better=draws, worse=beams),
    ]


@cache
def of_target(exam: Evaluation) -> dict[str, float | None]:
    """What the target's own greedy translations are worth."""
    target, prompts = load_target(exam.target), exam.read()
    texts = greedy_texts(exam, target, [one.token_ids(target.tokenizer) for one in prompts])
    chrf, bleu = quality(prompts, texts)
    return {"chrf": chrf, "bleu": bleu}


def best_run(some: Sequence[Evaluated]) -> Run:
    """What is best on the first half of the prompts; the first is the draft that all began with."""
    _, *others = some
    return max(others, key=lambda one: one.marks.of(halves(one)[0]).mean_tau).run


def gain(base: Evaluated, seeds: Sequence[Evaluated]) -> Difference:
    """Compare the chosen setting with the undistilled draft on the other half of the prompts."""
    rest = halves(base)[1]
    return difference(
        seeds[0].run.name.removesuffix("-s0"),
        [one.marks.of(rest) for one in seeds],
        base.run.name,
        [base.marks.of(rest)],
    )


def halves(one: Evaluated) -> tuple[slice, slice]:
    """Split the prompts: the first half chooses a setting, the second half measures it."""
    middle = len(one.marks.decoded[0].tokens) // 2
    return slice(middle), slice(middle, None)


if __name__ == "__main__":
    main()
