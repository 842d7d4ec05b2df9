"""Medusa's typical acceptance: what it keeps, and that nobody takes it for lossless."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.tiny_models import save_pair

from draftsmith import cli
from draftsmith.bench.compare.model import read_runs
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import generate
from draftsmith.core.law import Law, Noise, Purpose
from draftsmith.core.lossy_rules import Typical
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import PADDING, ROOT, DraftTree, Proposal, TreeShape, Verdict
from draftsmith.core.verify import verify
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.lookahead import Lookahead
from draftsmith.drafters.medusa import Medusa
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import InputError, LossyRule
from draftsmith.targets.toy import TabularTarget

V = 8


class Laws:
    """A law for every node of every row, and the law behind the root."""

    def __init__(self, probs_BNV: np.ndarray) -> None:
        self.probs_BNV = probs_BNV

    def at(self, rows: np.ndarray, nodes: np.ndarray) -> Law:
        return Law(torch.from_numpy(self.probs_BNV[rows, nodes + 1]), V)


def a_tree(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> DraftTree:
    return DraftTree(
        tokens_BN=torch.tensor(tokens), parents_BN=torch.tensor(parents), proposal=Proposal.OPAQUE
    )


def verdict_of(
    tree: DraftTree, laws: Laws, rule: Typical | None = None, noise: Noise | None = None
) -> Verdict:
    rows = range(tree.num_rows)
    noise = noise or Noise(0, rows, [3] * len(rows))
    return verify(tree, laws, rule or Typical(), noise, allow_lossy=True)


def path_of(verdict: Verdict, row: int = 0) -> list[int]:
    return verdict.path_BD[row, : int(verdict.num_accepted_B[row])].tolist()


# --------------------------------------------------------------------------- the rule, by hand


def test_every_path_tried_by_brute_force() -> None:
    """Random laws on random trees, rows of unequal size: all chains of nodes from the root whose
    tokens all stay are listed; the verdict is the best of them, and the next token its law's."""
    lengths = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows, nodes = 3, int(rng.integers(1, 9))
        parents = np.full((rows, nodes), PADDING)
        for b in range(rows):
            for n in range(int(rng.integers(0, nodes + 1))):
                parents[b, n] = rng.integers(ROOT, n)
        tokens = rng.integers(0, V, (rows, nodes))
        sharp = rng.choice([0.2, 1.0, 20.0])
        probs = rng.dirichlet(np.full(V, sharp), size=(rows, 1 + nodes)) + 1e-12
        probs /= probs.sum(-1, keepdims=True)
        epsilon, alpha = rng.uniform(0.02, 0.4), rng.uniform(0.1, 1.5)
        noise = Noise(seed, [7, 8, 9], [3, 5, 4])
        verdict = verdict_of(
            a_tree(tokens, parents), Laws(probs), Typical(epsilon=epsilon, alpha=alpha), noise
        )
        for b in range(rows):
            stays = []
            for count in range(nodes + 1):
                for chain in itertools.combinations(range(nodes), count):
                    above = (ROOT, *chain[:-1]) if chain else ()
                    if any(parents[b, n] != m for m, n in zip(above, chain, strict=True)):
                        continue
                    likelihood = 0.0
                    for m, n in zip(above, chain, strict=True):
                        law = probs[b, m + 1]
                        entropy = -(law * np.log(law)).sum()
                        p = law[tokens[b, n]]
                        if p <= min(epsilon, alpha * np.exp(-entropy)):
                            break
                        likelihood += np.log(p)
                    else:
                        stays.append((count, likelihood, chain))
            most = max(entry[0] for entry in stays)
            best = max(entry[1] for entry in stays if entry[0] == most)
            expected = next(c for n, likely, c in stays if n == most and likely >= best - 1e-12)
            assert path_of(verdict, b) == list(expected), f"seed {seed}, row {b}"
            end = expected[-1] if expected else ROOT
            law = Law(torch.from_numpy(probs[b, end + 1][None]), V)
            drawn = law.draw(noise, np.array([b]), most, Purpose.TARGET)
            assert int(verdict.next_token_B[b]) == int(drawn[0])
            lengths.add(most)
    assert lengths >= {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("law", "stays"),
    [
        # H = ln 8: the threshold is .3 / 8, and every one of eight equal tokens is above it
        ([1 / 8] * 8, True),
        # sharp: .3 exp(-.36) = .21 is above .09, so .09 decides
        ([0.089, 0.911, 0, 0, 0, 0, 0, 0], False),
        ([0.091, 0.909, 0, 0, 0, 0, 0, 0], True),
        # between: H = 2.03 gives .039
        ([0.042, *[0.958 / 7] * 7], True),
        ([0.036, *[0.964 / 7] * 7], False),
    ],
)
def test_thresholds_of_the_paper(law: list[float], stays: bool) -> None:
    probs = np.array([[law, [1 / V] * V]])
    assert path_of(verdict_of(a_tree([[0]], [[ROOT]]), Laws(probs))) == ([0] if stays else [])


def test_the_threshold_itself_is_not_enough() -> None:
    probs = np.array([[[0.25] * 4 + [0.0] * 4] * 2])
    tree = a_tree([[0]], [[ROOT]])
    assert path_of(verdict_of(tree, Laws(probs), Typical(epsilon=0.25, alpha=9.0))) == []
    assert path_of(verdict_of(tree, Laws(probs), Typical(epsilon=0.2499, alpha=9.0))) == [0]


def test_of_equally_long_paths_the_likelier_and_then_the_first_stays() -> None:
    probs = np.full((1, 5, V), 1 / V)
    probs[0, 0] = [0.3, 0.5, 0.2, 0, 0, 0, 0, 0]
    two = a_tree([[0, 1]], [[ROOT, ROOT]])
    assert path_of(verdict_of(two, Laws(probs))) == [1]
    twins = a_tree([[1, 1]], [[ROOT, ROOT]])
    assert path_of(verdict_of(twins, Laws(probs))) == [0]
    # the longer path wins although its first token is the less likely one
    longer = a_tree([[0, 1, 4]], [[ROOT, ROOT, 0]])
    assert path_of(verdict_of(longer, Laws(probs))) == [0, 2]


def test_the_law_is_another() -> None:
    """A token of probability .1 is said every time; this is what lossy means."""
    law = [0.1, 0.5, 0.4, 0, 0, 0, 0, 0]
    probs, tree = np.array([[law, law]]), a_tree([[0]], [[ROOT]])
    first = []
    for seed in range(50):
        verdict = verdict_of(tree, Laws(probs), noise=Noise(seed, [0], [3]))
        first.append(0 if path_of(verdict) else int(verdict.next_token_B[0]))
    assert set(first) == {0}
    with pytest.raises(LossyRule, match="allow_lossy"):
        verify(tree, Laws(probs), Typical(), Noise(0, [0], [3]))


@pytest.mark.parametrize("numbers", [(-0.1, 0.3), (1.1, 0.3), (0.1, -1.0), (0.1, math.nan)])
def test_thresholds_without_meaning_are_refused(numbers: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="epsilon between 0 and 1"):
        Typical(epsilon=numbers[0], alpha=numbers[1])


# --------------------------------------------------------------------------- whole decodings


def drafters() -> list[tuple[Drafter, TreeShape | None]]:
    model = TabularTarget(V, seed=1)
    return [
        (PromptLookup(), None),
        (Lookahead(), None),  # chains side by side, with probes between them
        (Independent(Independent.Config(), model=model), TreeShape.chain(4)),
        (Independent(Independent.Config(proposal="greedy"), model=model), TreeShape(widths=(3, 2))),
        (Medusa(), None),
    ]


@pytest.mark.parametrize("number", range(5))
def test_what_stays_is_typical_in_its_own_text_and_what_follows_is_drawn(number: int) -> None:
    """Checked from the tokens alone, by the table that the target's laws come from."""
    drafter, shape = drafters()[number]
    target, rule = TabularTarget(V, scale=1.0), Typical(epsilon=0.15, alpha=0.6)
    drafter.bind(target)
    prompts, kept = [[1, 2, 1, 2, 1], [3, 4]], 0
    options = DecodeOptions(
        sampler=Sampler(temperature=0.9), max_new_tokens=25, rule=rule, shape=shape,
        allow_lossy=True,
    )  # fmt: skip
    texts = [list(prompt) for prompt in prompts]
    for step in decode(target, drafter, prompts, options):
        for text, emitted, accepted in zip(texts, step.emitted, step.accepted, strict=True):
            for place, token in enumerate(emitted):
                law = (target.logits_after(text) / 0.9).softmax(-1)
                if place < accepted:
                    threshold = min(0.15, 0.6 * math.exp(float((law * law.log()).sum())))
                    assert float(law[token]) > threshold
                    kept += 1
                text.append(token)
    assert kept > 0


@pytest.mark.parametrize("number", range(5))
def test_at_temperature_0_it_is_the_greedy_text(number: int) -> None:
    drafter, shape = drafters()[number]
    target = TabularTarget(V)
    drafter.bind(target)
    prompts = [[1, 2, 1, 2, 1], [3], [4, 4, 4]]
    typical = DecodeOptions(max_new_tokens=20, rule="typical", shape=shape, allow_lossy=True)
    made = generate(target, drafter, prompts, typical, batch_size=3)
    plain = generate(target, NoDrafter(), prompts, DecodeOptions(max_new_tokens=20))
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]


def test_without_a_draft_it_is_the_targets_own_law() -> None:
    target, sampler = TabularTarget(V), Sampler(temperature=1.0)
    texts = [
        generate(target, NoDrafter(), [[1, 2]], DecodeOptions(sampler=sampler, **more))[0].token_ids
        for more in ({}, {"rule": "typical", "allow_lossy": True})
    ]
    assert texts[0] == texts[1]


def test_decoding_refuses_it_without_leave() -> None:
    target = TabularTarget(V)
    with pytest.raises(LossyRule, match="allow_lossy"):
        list(decode(target, NoDrafter(), [[1]], DecodeOptions(rule="typical")))


# --------------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_pair(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def test_generate_says_that_it_is_lossy(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--target", str(models / "target"), "--prompt", "the cat", "--drafter"]
    words += [f"independent:{models / 'draft'}", "--temperature", "1", "--max-new-tokens", "8"]
    code, out, err = run(capsys, *words, "--acceptance", "typical", "--json")
    assert code == 0, err
    payload = json.loads(out)
    said = "rule typical is lossy: the output law is not the target's"
    assert payload["lossy"] == said
    assert " ".join(err.split()).count(said) == 2, "before the texts and behind them"
    code, out, err = run(capsys, *words, "--json")
    assert "lossy" not in json.loads(out) and "lossy" not in err


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_it_is_a_rule_of_its_own(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--target", "T", "--prompt", "x", "--acceptance", "typical"]
    code, _, err = run(capsys, *words, "--rule", rule)
    assert code == 2 and "leave out --rule" in err


def test_bench_never_calls_it_identical(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out = tmp_path / "suite.txt", tmp_path / "out"
    suite.write_text("the cat sat on the cat\nreturn left\n")
    code, shown, err = run(
        capsys, "bench", "--target", str(models / "target"), "--drafter", "prompt_lookup",
        "--suite", str(suite), "--acceptance", "typical", "--temperature", "0,1", "--repeats", "1",
        "--warmup", "0", "--max-new-tokens", "8", "--out", str(out), "--dtype", "float32",
    )  # fmt: skip
    assert code == 0, err
    said = "rule typical is lossy: the output law is not the target's"
    assert said in shown and "identical" not in shown and "equal is their law" not in shown
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    drafted = [entry for entry in summary["drafters"] if entry["name"] == "prompt_lookup"]
    assert [entry["lossy_rule"] for entry in drafted] == ["typical"] * 2
    assert all(entry["identical_to_autoregressive"] is None for entry in drafted)
    assert all(entry["divergences"] is None for entry in drafted)
    assert summary["losslessness"]["lossy_rules"] == ["typical"]
    assert any(said in sentence for sentence in summary["losslessness"]["sentences"])
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    for line in lines:
        lossy = line["drafter"] == "prompt_lookup"
        assert line["lossy_rule"] == ("typical" if lossy else None)
        if lossy:
            assert line["identical"] is None and line["divergence"] is None
    page = (out / "report.html").read_text()
    assert "prompt_lookup (lossy)" in page and "lossy rule: not compared" in page
    assert said in page.replace("&#39;", "'")
    # and it is not ranked beside others, from its lines or from its summary
    for name in ("records.jsonl", "summary.json"):
        with pytest.raises(InputError, match="cannot be ranked"):
            read_runs([out])
        (out / name).unlink()


def test_the_terminal_table_marks_it(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.unit.test_bench_report import a_report

    from draftsmith.bench.summary import losslessness_sentences, speed_sentences, terminal_table

    report = a_report()
    marked = replace(
        report,
        records=tuple(
            replace(record, lossy_rule="typical", identical=None)
            if record.drafter == "prompt_lookup"
            else record
            for record in report.records
        ),
    )
    console = Console(width=120, record=True, file=(tmp_path / "table").open("w"))
    console.print(terminal_table(marked))
    rows = [line for line in console.export_text().splitlines() if "prompt_lookup" in line]
    assert len(rows) == 2 and all("lossy" in row.split("prompt_lookup")[1] for row in rows)
    assert any(line.startswith("prompt_lookup (lossy)") for line in speed_sentences(marked))
    assert losslessness_sentences(marked)[0].startswith("Drafts were not verified exactly")
