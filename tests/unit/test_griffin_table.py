"""The table of GRIFFIN's paper on the real model: what its cells count, and which drafters it
takes."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import save_pair

from draftsmith.core.config import LOSSY_RULES
from draftsmith.core.types import Signals
from draftsmith.data.prompts import Message, Prompt
from draftsmith.drafters.registry import drafter_class, make_drafter
from draftsmith.targets.hf import load_target
from griffin_table import table as griffin
from recorded import states_along


def trained(folder: Path, **held_out: float) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"results": {"held_out": held_out}}))


def test_of_each_kind_the_best_on_held_out_texts_is_taken(tmp_path: Path) -> None:
    trained(tmp_path / "hass-1e-3", tokens_per_step=1.9, tokens_per_step_t1=2.0)
    trained(tmp_path / "hass-2e-3", tokens_per_step=1.8, tokens_per_step_t1=2.2)
    trained(tmp_path / "sps-1e-3", acceptance=0.4)
    trained(tmp_path / "sps-2e-3", acceptance=0.3)
    trained(tmp_path / "other-1e-3", tokens_per_step=9, tokens_per_step_t1=9)
    (tmp_path / "sps").mkdir()  # what the draft model begins as
    assert griffin.best_of_each(tmp_path) == {
        "hass": str(tmp_path / "hass-2e-3"),
        "sps": str(tmp_path / "sps-1e-3"),
    }


def cell(tokens: tuple[int, ...], steps: tuple[int, ...]) -> dict[str, object]:
    decoded = griffin.Decoded(
        shape=griffin.DYNAMIC,
        temperature=0.0,
        tokens=tokens,
        steps=steps,
        accepted=tuple(a - b for a, b in zip(tokens, steps, strict=True)),
        offered=steps,
        loop_tokens=(3, 0),
        outside=tuple(griffin_counts(a, b) for a, b in zip(tokens, steps, strict=True)),
        by_depth=(((4, 3), (3, 1)), ((6, 3),)),
    )
    content: dict[str, object] = json.loads(json.dumps(asdict(decoded)))  # as it is kept
    return content


def griffin_counts(tokens: int, steps: int) -> object:
    from draftsmith.bench.loops import StepCounts

    return StepCounts(tokens=tokens, steps=steps, accepted=tokens - steps, offered=steps)


def test_a_row_divides_sums_and_counts_refusals_by_depth(tmp_path: Path) -> None:
    suites = {"A": cell((6, 4), (3, 2)), "B": cell((9, 3), (2, 1))}
    folder = tmp_path / "hass-1e-3"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"results": {"tokens": 12_812_288}}))
    content = {"drafter": f"hass:{folder}", "rule": "auto", "suites": suites}
    speed = {"A": {"speedup": 1.2, "ci95": None}, "B": {"speedup": 1.4, "ci95": [1.3, 1.5]}}
    row = griffin.row("HASS", 0.0, content, speed, "--draft-length auto --draft-tree 4,2")
    assert row["suites"]["A"]["tau"] == 2.0
    assert row["suites"]["B"]["tau"] == 4.0
    assert row["mean"] == 3.0  # of suites, not of all prompts
    assert row["suites"]["A"]["loop_share"] == 0.3
    assert row["suites"]["A"]["refused"] == [0.4, 0.6667]  # 6 of 10, then 1 of 3 were accepted
    assert row["suites"]["A"]["ci95"] == [2.0, 2.0]  # both prompts have the same ratio
    text = griffin.table([row], ["A", "B"])
    assert (
        "| 0 | HASS | 12.8 M | 2.00 (2.00 to 2.00) | 4.00 (3.00 to 4.50) | 3.00 | 3.00 | 28% |"
        in text
    )
    assert text.endswith("| 1.30 | length auto, tree 4,2 |\n")
    assert griffin.trained_tokens("suffix") is None


@pytest.mark.parametrize(("before", "all_of_them"), [(5, 12), (0, 7), (None, 7)])
def test_tokens_of_earlier_trainings_count_where_they_are_known(
    before: int | None, all_of_them: int, tmp_path: Path
) -> None:
    results = {"tokens": 7, "tokens_before": before}
    (tmp_path / "run.json").write_text(json.dumps({"results": results}))
    assert griffin.trained_tokens(f"unrolled:{tmp_path}") == all_of_them


def test_methods_are_compared_on_the_same_prompts() -> None:
    """Means of suites: (2 + 4) over (1.5 + 2). Prompts of unequal weight, all 4/3 or 2 times."""
    one = {"suites": {"A": cell((6, 40), (3, 20)), "B": cell((8, 16), (2, 4))}}
    other = {"suites": {"A": cell((6, 39), (4, 26)), "B": cell((8, 16), (4, 8))}}
    found = griffin.ratio(one, other)
    assert found["ratio"] == round(6 / 3.5, 4)
    assert found["ci95"] == [found["ratio"]] * 2  # each prompt has the ratio of its suite
    mixed = {"suites": {"A": cell((6, 39), (4, 26)), "B": cell((8, 16), (2, 8))}}
    low, high = griffin.ratio(one, mixed)["ci95"]
    assert low < griffin.ratio(one, mixed)["ratio"] < high


def test_what_says_other_texts_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typical acceptance has the most tokens per step, and no place among the others."""
    drafters, out = tmp_path / "drafters", tmp_path / "table"
    for kind in ("medusa", "unrolled"):
        (drafters / f"{kind}-2e-3").mkdir(parents=True)
        results = {"held_out": {"acceptance": 0.5}, "tokens": 9}
        (drafters / f"{kind}-2e-3/run.json").write_text(json.dumps({"results": results}))
    (out / "cells").mkdir(parents=True)
    (out / "prompts.json").write_text(json.dumps({"suites": {"A": [[1], [2]]}}))
    for name, kind, rule, tokens in (
        ("Medusa", "medusa", "auto", 2),
        ("Medusa (typical)", "medusa", "typical", 9),
        (griffin.OURS, "unrolled", "auto", 3),
    ):
        counts = cell((tokens, tokens), (1, 1))
        drafter = f"{kind}:{drafters}/{kind}-2e-3"
        content = {"drafter": drafter, "rule": rule, "suites": {"A": counts}}
        griffin.path_of(out, name, 1.0).write_text(json.dumps(content))
    monkeypatch.setattr(griffin.Table, "run", lambda self: None)
    words = ["table.py", "--out", str(out), "--drafters", str(drafters)]
    monkeypatch.setattr(sys, "argv", words)
    griffin.main()
    printed = capsys.readouterr().out
    assert "| 1 | Medusa (typical) | 0.0 M | 9.00 (9.00 to 9.00) |" in printed
    assert printed.endswith(
        "| 1 | unrolled (ours) | +50.0 % (+50.0 % to +50.0 %) than Medusa |  |\n"
        "| 1 | Medusa |  | +50.0 % (+50.0 % to +50.0 %) |\n\n"
    )
    typical = griffin.of_seed(out, "Medusa (typical)", 1.0)
    assert typical == {"mean": 9.0}


def test_further_seeds_stand_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HASS is missing in one table, ours in another; what does not learn has no seeds. Two suites,
    two temperatures, of which the second one is counted of ours alone."""
    tables = [tmp_path / f"table-{seed}" for seed in range(3)]
    taus = [{"suffix": 1, "hass": 2, "unrolled": 3}, {"suffix": 1, "unrolled": 5}, {"hass": 6}]
    for kind in ("hass", "unrolled"):
        kept = tmp_path / "drafters" / f"{kind}-2e-3"
        kept.mkdir(parents=True)
        figures = {"held_out": {"acceptance": 0.5}, "tokens": 9}
        (kept / "run.json").write_text(json.dumps({"results": figures}))
    names = {"suffix": "suffix", "hass": "HASS", "unrolled": griffin.OURS}
    for folder, found in zip(tables, taus, strict=True):
        (folder / "cells").mkdir(parents=True)
        (folder / "prompts.json").write_text(json.dumps({"suites": {"A": [[1], [2]], "B": [[3]]}}))
        for (kind, tau), heat in itertools.product(found.items(), (1.0, 0.0)):
            drafter = kind if kind == "suffix" else f"{kind}:{tmp_path / 'drafters'}/{kind}-2e-3"
            counts = ((3 * tau, 2 * tau), (3, 2)), ((3 * tau + 6, 2 * tau + 4), (3, 2))
            suites = {suite: cell(*its) for suite, its in zip("AB", counts, strict=True)}
            content = {"drafter": drafter, "rule": "auto", "suites": suites}
            if not heat or kind != "suffix":
                griffin.path_of(folder, names[kind], heat).write_text(json.dumps(content))
    monkeypatch.setattr(griffin.Table, "run", lambda self: None)
    words = ["table.py", "--out", tables[0], "--drafters", tmp_path / "drafters"]

    def ran(*seeds: Path) -> str:
        given = ["--seed-tables", *seeds] if seeds else []
        monkeypatch.setattr(sys, "argv", list(map(str, [*words, *given])))
        griffin.main()
        return capsys.readouterr().out

    assert "seed" not in ran()
    printed = ran(*tables[1:])
    assert printed.endswith(
        "| T | method | more than the next one | ours more than it |\n|---:|---|---:|---:|\n"
        "| 0 | unrolled (ours) | +33.3 % (+33.3 % to +33.3 %) than HASS |  |\n"
        "| 0 | HASS | +50.0 % (+50.0 % to +50.0 %) than suffix | +33.3 % (+33.3 % to +33.3 %) |\n"
        "| 0 | suffix |  | +100.0 % (+100.0 % to +100.0 %) |\n"
        "| 1 | unrolled (ours) | +33.3 % (+33.3 % to +33.3 %) than HASS |  |\n"
        "| 1 | HASS |  | +33.3 % (+33.3 % to +33.3 %) |\n"
        "\n| T | method | seed 0 | seed 1 | seed 2 |\n|---:|---|---:|---:|---:|\n"
        "| 0 | HASS | 3.00 (ours +33.3 %) |  | 7.00 |\n"
        "| 0 | unrolled (ours) | 4.00 | 6.00 |  |\n"
        "| 1 | HASS | 3.00 (ours +33.3 %) |  | 7.00 |\n"
        "| 1 | unrolled (ours) | 4.00 | 6.00 |  |\n\n"
    )
    with pytest.raises(SystemExit, match="2"):
        ran(tables[1], tables[1])
    assert "--seed-tables: each once, and none of them --out" in capsys.readouterr().err
    (tables[2] / "prompts.json").write_text(json.dumps({"suites": {"A": [[1], [3]]}}))
    with pytest.raises(SystemExit, match="2"):
        ran(tables[2])
    said = f"--seed-tables {tables[2]}: a table of the prompts of {tables[0]}"
    assert said in capsys.readouterr().err


def test_speeds_are_those_of_the_methods_own_drafter(tmp_path: Path) -> None:
    options = argparse.Namespace(
        out=tmp_path,
        target="x",
        data=tmp_path,
        limit=2,
        max_new_tokens=8,
        drafters=None,
        methods=None,
        device="cpu",
    )
    work = griffin.Table(options)

    def timed(method: str, suite: str, name: str, speedup: float) -> None:
        file = work.speed(method, 0.0) / suite / "summary.json"
        file.parent.mkdir(parents=True)
        drafters = [
            {"name": "none", "speedup": 1.0, "speedup_ci95": None},
            {"name": name, "speedup": speedup, "speedup_ci95": None},
        ]
        file.write_text(json.dumps({"drafters": drafters, "prompts": 3}))

    assert work.timed_prompts() is None
    timed("suffix", "GSM8K", "suffix", 1.5)
    timed("suffix", "HumanEval", "suffix", 1.2)
    timed("PLD", "GSM8K", "prompt_lookup", 1.3)
    assert work.speeds("suffix", 0.0) == {
        "HumanEval": {"speedup": 1.2, "ci95": None},
        "GSM8K": {"speedup": 1.5, "ci95": None},
    }
    assert work.speeds("PLD", 0.0)["GSM8K"]["speedup"] == 1.3
    work.drafters["HASS"] = "hass:/somewhere/hass-1e-3"  # a report has no folders above it
    timed("HASS", "GSM8K", "hass:.../hass-1e-3", 1.1)
    assert work.speeds("HASS", 0.0)["GSM8K"]["speedup"] == 1.1
    assert work.speeds("PLD", 1.0) == work.speeds("Lookahead", 0.0) == {}
    assert work.timed_prompts() == 3


def test_what_is_timed_is_what_tune_found_fastest_on_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "drafters" / "medusa-1", acceptance=0.1)
    options = argparse.Namespace(
        **{"out": tmp_path, "target": "x", "data": tmp_path, "limit": None, "clock": 3},
        **{"max_new_tokens": 8, "drafters": tmp_path / "drafters", "device": "cpu"},
        methods="PLD,Medusa (typical)",
    )
    work, ran = griffin.Table(options), list[dict[str, str]]()

    def run(words: list[str]) -> argparse.Namespace:
        given = dict(itertools.pairwise(words[4:])) | {"verb": words[3]}
        ran.append(given)
        out, drafter = Path(given["--out"]), griffin.portable_text(given["--drafter"])
        out.mkdir(parents=True, exist_ok=True)
        found = [
            {"drafter": drafter, "flags": ["--draft-length", "2"]},
            {"drafter": drafter, "flags": ["--draft-length", "4"]},
        ]
        if given["verb"] == "tune":
            (out / "tune.json").write_text(json.dumps({"candidates": found}))
        else:
            report = {"drafters": [{"name": drafter, "speedup": 1.5, "speedup_ci95": None}]}
            (out / "summary.json").write_text(json.dumps(report))
        return argparse.Namespace(returncode=0)

    def load(path: Path, limit: int) -> list[Prompt]:
        chat = "Human" not in path.name
        prompts = []
        for i in range(limit):
            said = Message(role="user", content=str(i))
            asked = {"messages": (said,), "turns": ("2",)} if chat else {"text": str(i)}
            prompts.append(Prompt(id=f"{path.name}-{i}", **asked))
        return prompts

    monkeypatch.setattr(griffin.subprocess, "run", run)
    monkeypatch.setattr(griffin, "load_prompts", load)
    work.time()
    work.time()
    assert [one["verb"] for one in ran] == 3 * ["tune", *3 * ["bench"]], "three cells, once"
    assert [one["--temperature"] for one in ran[::4]] == ["0", "1", "1"]
    assert [one["--drafter"].partition(":")[0] for one in ran[::4]] == 2 * ["prompt_lookup"] + [
        "medusa"
    ]
    for one in ran:
        assert one.get("--acceptance") == ("typical" if "medusa" in one["--drafter"] else None)
        if one["verb"] == "bench":
            assert one["--draft-length"] == "2" and one["--limit"] == "3"
        else:
            assert one["--suite"] == str(tmp_path / "tuning.jsonl")
    assert work.drafts("PLD", 0.0) == "--draft-length 2" and work.drafts("suffix", 0.0) is None
    asked = [json.loads(line) for line in (tmp_path / "tuning.jsonl").open()]
    assert len(asked) == 3 * griffin.TUNING
    assert {"id": "test.jsonl.xz-79", "turns": ["79"]} in asked, "a chat, as when it is timed"
    assert {"id": "HumanEval.jsonl.gz-79", "prompt": "79"} in asked
    assert not {f"test.jsonl.xz-{i}" for i in range(3)} & {one["id"] for one in asked}
    ran.clear()
    trained(tmp_path / "drafters" / "medusa-2", acceptance=0.2)
    griffin.Table(options).time()
    assert [one["verb"] for one in ran] == ["tune", *3 * ["bench"]], "of the better drafter"


def test_cells_of_other_options_or_drafters_are_not_mixed(tmp_path: Path) -> None:
    drafters = tmp_path / "drafters"
    trained(drafters / "hass-1e-3", tokens_per_step=1.9, tokens_per_step_t1=2.0)

    def table(**changes: object) -> Any:
        given = {"out": tmp_path / "table", "target": "x", "data": tmp_path, "limit": 2}
        given["device"] = "cpu"
        return griffin.Table(
            argparse.Namespace(
                **(given | {"max_new_tokens": 8, "drafters": drafters, "methods": None} | changes)
            )
        )

    first = table()
    content = {"drafter": f"hass:{drafters / 'hass-1e-3'}", "rule": "auto", "suites": {}}
    first.path("HASS", 0.0).write_text(json.dumps(content))
    assert table().is_counted("HASS", 0.0) and not table().is_counted("HASS", 1.0)
    trained(drafters / "hass-2e-3", tokens_per_step=2.9, tokens_per_step_t1=2.0)
    assert not table().is_counted("HASS", 0.0)
    with pytest.raises(SystemExit, match="was begun with --limit 2: give that"):
        table(limit=None)


@pytest.mark.parametrize(
    ("limit", "sizes"), [(None, [80, 80, 80]), (3, [3, 3, 3]), (164, [80, 164, 80])]
)
def test_all_of_humaneval_is_counted_where_its_size_is_asked_for(
    limit: int | None, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files as they are, but for the questions. What an OUT has made is kept as it is."""
    save_pair(tmp_path)
    loaded = load_target(tmp_path / "target")
    monkeypatch.setattr(griffin.Table, "target", lambda self: loaded)
    there = {"question.jsonl": 80, "HumanEval.jsonl.gz": 164, "test.jsonl.xz": 1319}

    def load(path: Path, limit: int) -> list[Prompt]:
        return [Prompt(id=str(i), text="add") for i in range(min(limit, there[path.name]))]

    monkeypatch.setattr(griffin, "load_prompts", load)
    options = {"out": tmp_path / "out", "target": "x", "data": tmp_path, "limit": limit}
    options |= {"device": "cpu", "max_new_tokens": 8, "drafters": None, "methods": None}
    work = griffin.Table(argparse.Namespace(**options, batch_size=4))
    assert [len(its) for its in work.prompts().values()] == sizes
    made = {"MT-bench": [[1]], "HumanEval": [[2]] * 80, "GSM8K": [[3]]}  # by an earlier version
    (tmp_path / "out" / "prompts.json").write_text(json.dumps({"suites": made}))
    assert work.prompts() == made


def test_every_method_names_a_drafter_that_train_makes_or_none() -> None:
    from draftsmith.drafters.config import cascade_parts, drafter_parts, kinds

    paths = dict.fromkeys(griffin.KINDS, "folder")
    for name, method in griffin.METHODS.items():
        spelt = method.drafter.format_map(paths)
        known = {drafter_parts(part)[0] for part in cascade_parts(spelt)}
        assert known <= {*kinds(), "folder"}, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--at-once", "0"], "--at-once must be at least 1, got 0"),
        (["--drafters", "nowhere"], "--drafters nowhere holds no trained drafter"),
        (["--methods", "PLD,Nope"], "--methods Nope: they are PLD"),
        (["--clock", "77"], "--clock 77: the last 4 of 80 are to tune by"),
        (["--methods", "HASS"], "--methods HASS: train them"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit, match="2"):
        griffin.main()
    assert message in capsys.readouterr().err


def test_only_what_draws_from_no_q_and_reads_no_law_is_counted_along_texts() -> None:
    reads_laws = {"lookahead", "recycling"}
    for name, method in griffin.METHODS.items():
        kind = method.drafter.partition(":")[0]
        kind = "independent" if kind == "{sps}" else kind
        drawn = hasattr(drafter_class(kind).Config, "proposal") and not method.shape.is_dynamic
        if kind in reads_laws or method.rule in LOSSY_RULES:
            assert method.repeats == (), name
        else:
            assert method.repeats == ((0.0,) if drawn else (0.0, 1.0)), name


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", ["PLD", "EAGLE-2"])
def test_a_cell_along_texts_counts_what_the_target_would(
    name: str, heat: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pair(tmp_path)
    target, method = load_target(tmp_path / "target"), griffin.METHODS[name]
    monkeypatch.setattr(griffin.Table, "target", lambda self: target)  # it compiles
    layer = make_drafter("eagle")
    layer.bind(target)
    layer.save(tmp_path / "drafters" / "eagle-1", kind="eagle")
    figures = {"held_out": {"acceptance": 0.5}, "tokens": 0}
    (tmp_path / "drafters" / "eagle-1" / "run.json").write_text(json.dumps({"results": figures}))
    words = {"target": str(tmp_path / "target"), "data": tmp_path, "limit": 3, "device": "cpu"}
    words |= {"out": tmp_path / "out", "drafters": tmp_path / "drafters", "methods": name}
    work = griffin.Table(argparse.Namespace(**words, max_new_tokens=24, batch_size=2))
    every = list(range(3, 299))  # whatever is drawn has stood in the prompt
    suites = {"A": [every, every[::-1], every[1::2]], "B": [every[::3]]}
    (tmp_path / "out" / "prompts.json").write_text(json.dumps({"suites": suites}))
    work.cell(name, heat)
    found = json.loads(work.path(name, heat).read_text())["suites"]
    for suite, prompts in suites.items():
        drafter = griffin.ready(work.drafters[name], target, method.shape)
        counted = griffin.count(work.exam(prompts), target, drafter, prompts, method.shape, heat)
        assert griffin.Decoded.from_json(found[suite]) == counted
        assert sum(counted.offered), "nothing was drafted: nothing was compared"
    last = Signals(last_hidden=True)
    recorded = work.recorded(target, heat, last)
    for suite in suites:
        its = recorded(suite)
        for text, states in zip(its.texts, its.states, strict=True):
            torch.testing.assert_close(states, states_along(target, text, last))
    suites["B"] = [every[::5]]
    (tmp_path / "out" / "prompts.json").write_text(json.dumps({"suites": suites}))
    again = work.recorded(target, heat, last)("B")
    assert again.texts[0][: len(every[::5])] == every[::5], "texts of other prompts are no use"
    assert len(again.states[0]) == len(again.texts[0])
