"""`draftsmith plan check`: predictions of a ladder beside later measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import ran
from tests.measurements import a_record

from draftsmith.bench.records import RunRecord
from draftsmith.bench.summary import BenchReport, summary
from draftsmith.errors import InputError
from draftsmith.plan.ladder import Estimate, Measured, compare, read_predictions
from draftsmith.provenance import append_jsonl, write_json_atomic

GAMMA = {"tiny": 2, "1m": 4}


def a_rung(size: str, size_in_params: float, **changes: Any) -> dict[str, Any]:
    gamma = GAMMA[size]
    return {
        "size": size,
        "params": size_in_params,
        "tokens": 1e9,
        "draft_ppl": 9.0,
        "gamma": gamma,
        "alpha": {"value": 0.6, "low": 0.5, "high": 0.7},
        "tau": {"value": 2.0, "low": 1.8, "high": 2.2},
        "speedup": {"value": 1.5, "low": 1.4, "high": 1.6},
        "cost_ratio": 0.01,
        "drafts": {kind: f"runs/l/{size}-{kind}" for kind in ("pretrained", "distilled")},
        **changes,
    }


def a_ladder(folder: Path, **changes: Any) -> Path:
    path = folder / "ladder.json"
    rungs = [a_rung("tiny", 1e5, **changes), a_rung("1m", 1e6)]
    path.write_text(json.dumps({"rungs": rungs}))
    return path


def stepped(
    drafter: str, prompt: int, *, seconds: float, steps: int = 10, **more: Any
) -> RunRecord:
    counts = {"steps": steps, "decode_steps": steps - 1}
    return a_record(drafter, prompt, seconds=seconds, **counts, **more)


def a_bench(folder: Path, draft: str, *, speedup: float, length: int | str | None) -> Path:
    """Two prompts that plain decoding takes 6 and 8 seconds for."""
    counts: dict[str, Any] = {"accepted": 10, "offered": 20, "by_position": ((10, 10), (10, 0))}
    lines = []
    for prompt, seconds in enumerate((6.0, 8.0)):
        lines.append(stepped("none", prompt, seconds=seconds, steps=20))
        lines.append(stepped(draft, prompt, seconds=seconds / speedup, **counts))
    append_jsonl(folder / "records.jsonl", *lines)
    report = BenchReport(
        target="t",
        dtype="float32",
        records=tuple(lines),
        command="",
        versions={},
        machine={},
        max_new_tokens=20,
    )
    write_json_atomic(folder / "summary.json", summary(report))
    write_json_atomic(folder / "run.json", {"options": {"drafting": {"draft_length": length}}})
    return folder


def observed(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    header = "target,draft,target_ppl,draft_ppl,alpha,moe,temperature,protocol,tokens_per_step_2,"
    text = "\n".join([header + "tokens_per_step_4", *lines])
    (folder / "observations.csv").write_text(text + "\n")
    return folder


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `plan check`: its JSON, or the sentence it failed with."""

    def run(ladder: Path, *words: str, code: int = 0) -> Any:
        own = ["plan", "check", str(ladder), "--records"]
        return ran(capsys, *own, *words, "--json", code=code)

    return run


def by_name(found: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["size"], row["kind"], row["quantity"]): row for row in found["comparisons"]}


def test_every_figure_is_set_beside_its_prediction(check: Any, tmp_path: Path) -> None:
    pairs = observed(
        tmp_path / "pairs",
        "t,runs/l/tiny-pretrained,5,9,0.3,0.02,0.0,,1.1,1.9",  # of no known protocol
        "t,runs/l/tiny-pretrained,5,9,0.55,0.02,0.0,decoded,2.1,2.9",
        "t,runs/l/1m-pretrained,5,8,0.72,0.02,0.0,decoded,2.3,2.1",
        "t,runs/l/1m-distilled,5,9,0.1,,0.0,retokenised,,",
        "t,runs/l/1m-distilled,5,9,0.9,0.01,0.0,decoded,2.7,2.6",
        "t,runs/other,5,9,0.9,,0.0,decoded,,",
    )
    tiny = a_bench(tmp_path / "a", "runs/l/tiny-pretrained", speedup=1.45, length=2)
    large = a_bench(tmp_path / "b", "runs/l/1m-distilled", speedup=1.9, length=4)
    words = [str(pairs), str(tiny), str(large), "--out", str(tmp_path / "out")]
    found = check(a_ladder(tmp_path), *words)
    rows = by_name(found)
    inside = {key: row["inside"] for key, row in rows.items()}
    assert inside == {
        ("tiny", "pretrained", "alpha"): True,
        ("1m", "pretrained", "alpha"): False,
        ("1m", "distilled", "alpha"): False,
        ("tiny", "pretrained", "tau"): True,
        ("1m", "pretrained", "tau"): True,
        ("1m", "distilled", "tau"): False,
        ("tiny", "pretrained", "speedup"): True,
        ("1m", "distilled", "speedup"): False,
    }
    assert (found["inside"], found["judged"]) == (4, 5), "distilled drafts are not predicted"
    alpha = rows["tiny", "pretrained", "alpha"]
    assert alpha["measured"] == pytest.approx({"value": 0.55, "low": 0.53, "high": 0.57})
    assert alpha["predicted"] == {"value": 0.6, "low": 0.5, "high": 0.7}
    assert alpha["source"].endswith("observations.csv"), "counts of whole drafts come first"
    assert rows["tiny", "pretrained", "tau"]["measured"]["value"] == 2.1, "at its draft length"
    assert rows["1m", "distilled", "alpha"]["measured"]["value"] == 0.9, "of a real decoder"
    speed = rows["tiny", "pretrained", "speedup"]["measured"]
    assert speed["value"] == pytest.approx(1.45) and speed["low"] is not None
    assert json.loads((tmp_path / "out" / "check.json").read_text()) == found
    for name in ("predicted_measured.svg", "predicted_measured.png", "run.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize("kept", ["records.jsonl", "summary.json"])
def test_records_or_a_summary_will_do(check: Any, tmp_path: Path, kept: str) -> None:
    folder = a_bench(tmp_path / "a", "runs/l/tiny-pretrained", speedup=1.45, length=2)
    for name in {"records.jsonl", "summary.json"} - {kept}:
        (folder / name).unlink()
    rows = by_name(check(a_ladder(tmp_path), str(folder)))
    assert rows["tiny", "pretrained", "speedup"]["measured"]["value"] == pytest.approx(1.45)
    assert rows["tiny", "pretrained", "tau"]["measured"]["value"] == 2.0
    alpha = rows.get(("tiny", "pretrained", "alpha"))
    if kept == "records.jsonl":
        assert alpha is not None and alpha["measured"]["value"] == 0.5, "10 of 20 that were tried"
    else:
        assert alpha is None, "a summary has no counts"


@pytest.mark.parametrize("length", [3, "adaptive", None])
def test_a_bench_with_other_drafts_is_not_compared(
    check: Any, tmp_path: Path, length: int | str | None
) -> None:
    folder = a_bench(tmp_path / "a", "runs/l/tiny-pretrained", speedup=1.45, length=length)
    found = check(a_ladder(tmp_path), str(folder))
    assert {row["quantity"] for row in found["comparisons"]} == {"alpha"}
    assert "predictions are for 2: its speed-up is left out" in found["warnings"][0]


def test_without_intervals_nothing_is_judged(check: Any, tmp_path: Path) -> None:
    pairs = observed(tmp_path / "p", "t,l/tiny-pretrained,5,9,0.55,,0.0,decoded,2.1,")
    ladder = a_ladder(
        tmp_path,
        alpha={"value": 0.6, "low": None, "high": None},
        tau={"value": 2.0, "low": None, "high": None},
    )
    found = check(ladder, str(pairs), "--out", str(tmp_path / "out"))
    assert [row["inside"] for row in found["comparisons"]] == [None, None]
    assert (found["inside"], found["judged"]) == (0, 0)
    assert found["comparisons"][0]["measured"]["low"] is None


def test_the_ends_of_an_interval_belong_to_it(tmp_path: Path) -> None:
    predictions = read_predictions(a_ladder(tmp_path))

    def inside(value: float) -> bool | None:
        measured = Measured(
            draft="independent:/home/me/runs/l/tiny-pretrained",
            temperature=None,
            values={("alpha", None): Estimate(value)},
            source="x",
        )
        rows, _ = compare(predictions, [measured])
        return rows[0].inside

    assert [inside(value) for value in (0.499, 0.5, 0.7, 0.701)] == [False, True, True, False]


def test_rows_are_sorted_by_figure_kind_and_size(tmp_path: Path) -> None:
    predictions = read_predictions(a_ladder(tmp_path))

    def measured(draft: str, quantity: str) -> Measured:
        size = draft.split("-")[0]
        return Measured(
            draft=draft,
            temperature=0.0,
            values={(quantity, None if quantity == "alpha" else GAMMA[size]): Estimate(1.0)},
            source="x",
        )

    names = ["1m-distilled", "tiny-distilled", "1m-pretrained", "tiny-pretrained"]
    found = [measured(name, quantity) for quantity in ("speedup", "alpha") for name in names]
    rows, said = compare(predictions, found)
    assert said == ()
    assert [(row.quantity, f"{row.size}-{row.kind}") for row in rows] == [
        (quantity, name) for quantity in ("alpha", "speedup") for name in reversed(names)
    ]


# --------------------------------------------------------------------------- bad input


def lines_of(*rows: Sequence[object]) -> list[str]:
    return [",".join(map(str, row)) for row in rows]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (("t", "d", 5, 9, "high", "", 0, "decoded", "", ""), "row 2 (line 3), column 'alpha'"),
        (("t", "d", 5, 9, 1.5, "", 0, "decoded", "", ""), "less than or equal to 1, got '1.5'"),
        (("t", "d", 5, 9, 0.5, "x", 0, "decoded", "", ""), "column 'moe': must be a number"),
        (("t", "", 5, 9, 0.5, "", 0, "decoded", "", ""), "column 'draft': there is no value"),
        (("t", "d", 5, 9, 0.5, "", 0, "decoded", "two", ""), "column 'tokens_per_step_2'"),
        (("t", "d"), "row 2 (line 3) has 2 values, the header has 10 columns"),
    ],
)
def test_a_bad_observation_is_named_by_row_and_column(
    check: Any, tmp_path: Path, row: Sequence[object], sentence: str
) -> None:
    good = ("t", "tiny-pretrained", 5, 9, 0.5, "", 0, "decoded", "", "")
    folder = observed(tmp_path / "p", *lines_of(good, row))
    said = check(a_ladder(tmp_path), str(folder), code=2)
    assert "observations.csv" in said and sentence in said


def test_a_bad_record_or_summary_is_named(check: Any, tmp_path: Path) -> None:
    ladder = a_ladder(tmp_path)
    folder = tmp_path / "p"
    folder.mkdir()
    assert "holds none of observations.csv, records.jsonl" in check(ladder, str(folder), code=2)
    (folder / "summary.json").write_text('{"drafters": [{"name": "x"}]}')
    said = check(ladder, str(folder), code=2)
    assert "summary.json, drafter 1" in said and "'temperature'" in said
    (folder / "records.jsonl").write_text("{}\n")
    assert "records.jsonl, line 1" in check(ladder, str(folder), code=2)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"name": 5}, "name"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"speedup": "x"}, "speedup"),
        ({"speedup": -1.0}, "speedup"),
        ({"alpha": 10**400}, "alpha"),
        ({"speedup_ci95": [1.0, 2.0, 3.0]}, "speedup_ci95"),
        ({"speedup_ci95": 5}, "speedup_ci95"),
        ({"speedup_ci95": ["low", "high"]}, "speedup_ci95"),
        (5, "drafter 1"),
    ],
)
def test_a_summary_that_holds_something_else_is_refused(
    check: Any, tmp_path: Path, change: Any, name: str
) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    entry = {"name": "l/tiny-pretrained", "temperature": 0.0, "speedup": 1.5}
    bad = {**entry, **change} if isinstance(change, dict) else change
    (folder / "summary.json").write_text(json.dumps({"drafters": [bad]}))
    said = check(a_ladder(tmp_path), str(folder), code=2)
    assert name in said and "summary.json, drafter 1" in said


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"params": 0.0}, "params"),
        ({"params": 1e308}, "params"),
        ({"gamma": 0}, "gamma"),
        ({"alpha": {"value": 1e308, "low": 0.0, "high": 1e308}}, "alpha.value"),
        ({"tau": {"value": -1.0}}, "tau.value"),
    ],
)
def test_a_ladder_with_numbers_out_of_range_is_refused(
    check: Any, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    folder = observed(tmp_path / "p", "t,l/tiny-pretrained,5,9,0.6,,0,decoded,,")
    said = check(a_ladder(tmp_path, **change), str(folder), code=2)
    assert name in said and "ladder.json, rung 1" in said


def test_a_column_for_an_endless_draft_length_is_none_of_ours(check: Any, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    header = f"target,draft,alpha,tokens_per_step_{'9' * 5000}"
    (folder / "observations.csv").write_text(f"{header}\nt,l/tiny-pretrained,0.6,2\n")
    found = check(a_ladder(tmp_path), str(folder))
    assert [row["quantity"] for row in found["comparisons"]] == ["alpha"]


def test_measurements_of_other_drafts_are_refused(check: Any, tmp_path: Path) -> None:
    folder = observed(tmp_path / "p", "t,my/own,5,9,0.5,,0,decoded,,")
    said = check(a_ladder(tmp_path), str(folder), code=2)
    assert "runs/l/1m-distilled, runs/l/1m-pretrained" in said and "they hold my/own" in said


def a_measured(draft: str) -> Measured:
    return Measured(
        draft=draft, temperature=0.0, values={("alpha", None): Estimate(0.6)}, source="x"
    )


@pytest.mark.parametrize(
    ("draft", "same"),
    [
        ("tiny-pretrained", True),
        ("l/tiny-pretrained", True),
        ("independent:runs/l/tiny-pretrained", True),
        ("./runs/l/tiny-pretrained", True),
        ("/home/me/runs/l/tiny-pretrained", True),
        (".../tiny-pretrained", True),
        ("../l/tiny-pretrained", True),
        ("elsewhere/other/tiny-pretrained", False),
        ("other/l/tiny-pretrained", False),
        ("tiny-pretrained/again", False),
    ],
)
def test_a_draft_is_known_by_as_much_of_its_folder_as_is_said(
    tmp_path: Path, draft: str, same: bool
) -> None:
    rows, _ = compare(read_predictions(a_ladder(tmp_path)), [a_measured(draft)])
    assert len(rows) == same


def test_a_draft_that_may_be_several_is_refused(tmp_path: Path) -> None:
    predictions = read_predictions(a_ladder(tmp_path))
    both = [a_measured("/a/runs/l/tiny-pretrained"), a_measured("/b/runs/l/tiny-pretrained")]
    with pytest.raises(InputError, match=r"/a/runs.*/b/runs.*both.*runs/l/tiny-"):
        compare(predictions, both)
    once = [a_measured("/a/runs/l/tiny-pretrained"), a_measured("tiny-pretrained")]
    assert len(compare(predictions, once)[0]) == 1
    folders = {"pretrained": "one/draft", "distilled": "two/draft"}
    alike = read_predictions(a_ladder(tmp_path, drafts=folders))
    with pytest.raises(InputError, match=r"draft.*one/draft.*two/draft"):
        compare(alike, [a_measured("draft")])
    assert compare(alike, [a_measured("two/draft")])[0][0].kind == "distilled"


def test_margins_end_where_rates_end(check: Any, tmp_path: Path) -> None:
    pairs = observed(
        tmp_path / "p",
        "t,tiny-pretrained,5,9,0.0,0.3,0.0,decoded,,",
        "t,1m-pretrained,5,9,1.0,0.3,0.0,decoded,,",
    )
    none, every = check(a_ladder(tmp_path), str(pairs))["comparisons"]
    assert none["measured"] == {"value": 0.0, "low": 0.0, "high": 0.3}
    assert every["measured"] == {"value": 1.0, "low": 0.7, "high": 1.0}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "holds no 'rungs'"),
        ('{"rungs": []}', "holds no 'rungs'"),
        ("{", "cannot read the predictions"),
        ('{"rungs": [7]}', "ladder.json, rung 1, got 7"),
        ('{"rungs": [{"size": "1m"}]}', "option 'params' of Rung is missing in"),
    ],
)
def test_bad_predictions_are_named(check: Any, tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "ladder.json"
    path.write_text(content)
    assert sentence in check(path, str(tmp_path), code=2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gamma": None}, "option gamma in X, rung 1: expected int, got None"),
        ({"drafts": {"pretrained": 3}}, "option drafts.pretrained in X, rung 1: expected str"),
        ({"alpha": 0.5}, "expected options of Estimate in alpha in X, rung 1, got 0.5"),
        ({"tau": {"value": "2"}}, "option tau.value in X, rung 1: expected float, got '2'"),
        ({"tau": {"value": math.nan}}, "option tau.value in X, rung 1: expected float, got nan"),
        ({"speedup": {"value": 1, "low": "x"}}, "option speedup.low in X, rung 1: expected"),
    ],
)
def test_bad_keys_of_predictions_are_named(
    check: Any, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    path = a_ladder(tmp_path, **changes)
    assert sentence.replace("X", str(path)) in check(path, str(tmp_path), code=2)


def test_estimates_survive_the_file(tmp_path: Path) -> None:
    (tiny, _) = read_predictions(a_ladder(tmp_path))
    assert asdict(tiny.tau) == a_rung("tiny", 1e5)["tau"]
    assert (tiny.gamma, tiny.params) == (2, 1e5)
