"""Runs are read from what they wrote, and what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.measurements import a_record

from draftsmith.bench.compare.model import RunMetrics, compare, read_runs
from draftsmith.bench.compare.page import write_comparison
from draftsmith.bench.records import BASELINE, RunRecord
from draftsmith.core.speedup import tokens_per_step
from draftsmith.errors import InputError
from draftsmith.provenance import append_jsonl, write_json_atomic


def distilled(folder: Path, **results: Any) -> Path:
    write_json_atomic(
        folder / "run.json",
        {"verb": "distill", "seed": 7, "results": {"objective": "rkl"} | results},
    )
    return folder


def decoded(drafter: str, prompt: int, language: str, *, temperature: float = 0.0) -> RunRecord:
    plain = drafter == BASELINE
    steps = 40 if plain else 16 if language == "ko" else 20
    return a_record(
        drafter,
        prompt,
        language=language,
        temperature=temperature,
        tokens=40,
        steps=steps,
        decode_steps=steps - 1,
        accepted=40 - steps,
        offered=(40 - steps) * 5 // 2,
        proposed=(40 - steps) * 5 // 2,
        seconds=2.0 if plain else 1.0,
    )


def benched(folder: Path, *drafters: str, temperature: float = 0.0) -> Path:
    lines = [
        decoded(drafter, prompt, language, temperature=temperature)
        for drafter in (BASELINE, *drafters)
        for prompt, language in enumerate(("fr", "ko"))
    ]
    append_jsonl(folder / "records.jsonl", *lines)
    write_json_atomic(folder / "summary.json", {"target": "models/t", "drafters": []})
    return folder


def test_a_distil_run_is_read_from_its_results(tmp_path: Path) -> None:
    folder = distilled(
        tmp_path / "a",
        forcing="beam",
        beams=8,
        teacher_temperature=1,
        top_k=50,
        alpha=0.7,
        tau_predicted=3.1,
        answer_tokens=10,
        store_bytes=3000,
        quality=51.5,
        quality_metric="chrF",
        by_language={"ko": {"alpha": 0.6, "tokens": 9}},
        training_loss=[[1, 2.0]],
    )
    whole, korean = read_runs([folder])
    assert whole == RunMetrics(
        label="a",
        objective="rkl",
        forcing="beam",
        beams=8,
        teacher_temperature=1.0,
        truncation="top-50",
        seed=7,
        alpha=0.7,
        tau_predicted=3.1,
        quality=51.5,
        quality_metric="chrF",
        storage_tokens=10,
        storage_bytes=3000,
    )
    assert (korean.language, korean.alpha, korean.tau_predicted) == ("ko", 0.6, None)
    (full,) = read_runs([distilled(tmp_path / "b", top_k=None)])
    (silent,) = read_runs([distilled(tmp_path / "c")])
    assert (full.truncation, silent.truncation) == ("full", None)


def test_the_acceptance_before_training_is_the_undistilled_draft(tmp_path: Path) -> None:
    same = [
        distilled(tmp_path / n, alpha=0.7, alpha_before=0.51, seed=i) for i, n in enumerate("ab")
    ]
    *_, before = read_runs(same)
    assert (before.objective, before.alpha, before.label) == ("none", 0.51, "before distillation")
    other = distilled(tmp_path / "c", alpha=0.7, alpha_before=0.4)
    assert [run.objective for run in read_runs([*same, other])] == ["rkl"] * 3
    assert before.tau_predicted is None
    foretold = distilled(tmp_path / "e", alpha=0.7, alpha_before=0.51, gamma=5, tau_predicted=2.9)
    assert read_runs([foretold])[-1].tau_predicted == pytest.approx(float(tokens_per_step(0.51, 5)))
    assert read_runs([*same, foretold])[-1].tau_predicted == read_runs([foretold])[-1].tau_predicted
    longer = distilled(tmp_path / "f", alpha=0.7, alpha_before=0.51, gamma=8, tau_predicted=3.0)
    last = read_runs([foretold, longer])[-1]
    assert (last.objective, last.alpha, last.tau_predicted) == ("none", 0.51, None)
    named = distilled(tmp_path / "d", objective="none", alpha=0.51, alpha_before=0.51)
    assert len(read_runs([*same, named])) == 3


def test_a_bench_is_read_from_its_records_by_language(tmp_path: Path) -> None:
    runs = read_runs([benched(tmp_path / "bench", "prompt_lookup", "independent:models/x/draft")])
    assert {run.label for run in runs} == {"prompt_lookup", "independent:draft"}
    by = {(run.label, run.language): run for run in runs}
    assert by["prompt_lookup", None].tau == pytest.approx(78 / 34)
    assert by["prompt_lookup", None].tau_with_prefill == pytest.approx(80 / 36)
    assert by["prompt_lookup", "fr"].tau == 39 / 19
    assert by["prompt_lookup", "ko"].tau_with_prefill == 2.5
    assert by["prompt_lookup", None].alpha_decoded == 0.4
    assert by["prompt_lookup", "ko"].speedup == pytest.approx(2.0)
    assert {run.target for run in runs} == {"models/t"}
    assert len(runs) == 6


def test_a_bench_without_records_is_read_from_its_summary(tmp_path: Path) -> None:
    entries = [
        {"name": BASELINE, "temperature": 0.0, "tokens_per_step": 1.0},
        {"name": "prompt_lookup", "temperature": 0.0, "tokens_per_step": 2.2, "speedup": None},
    ]
    write_json_atomic(tmp_path / "summary.json", {"target": "t", "drafters": entries, "x": 1})
    (run,) = read_runs([tmp_path])
    # it counted the prompt's step, too: not to be ranked among those that do not
    assert (run.label, run.tau, run.tau_with_prefill) == ("prompt_lookup", None, 2.2)
    assert (run.speedup, run.loop_share) == (None, None)
    entries[1] |= {"decode_tokens_per_step": 2.3, "loop_share": 0.5}
    entries[1] |= {"decode_tokens_per_step_outside_loops": 1.5, "acceptance_rate_outside_loops": 0}
    write_json_atomic(tmp_path / "summary.json", {"target": "t", "drafters": entries})
    (run,) = read_runs([tmp_path])
    assert (run.tau, run.tau_with_prefill, run.loop_share) == (2.3, 2.2, 0.5)
    assert (run.tau_outside_loops, run.alpha_outside_loops) == (1.5, 0.0)


def test_a_measured_drafter_takes_over_the_setting_of_its_distil_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results: dict[str, Any] = {"forcing": "beam", "beams": 8, "alpha": 0.7, "tau_predicted": 3.0}
    a = distilled(Path("runs/a"), **results, decoding_temperature=0.0)
    b = distilled(Path("runs/b"), **results, decoding_temperature=1.0)
    c = distilled(Path("runs/c"), **results)
    bench = benched(Path("bench"), "independent:runs/a", "independent:runs/b", "prompt_lookup")
    runs = read_runs([a, b, c, bench])
    whole = {run.label: run for run in runs if run.language is None}
    assert set(whole) == {"a", "b", "c", "prompt_lookup"}
    assert (whole["a"].objective, whole["a"].beams, whole["a"].seed) == ("rkl", 8, 7)
    assert whole["a"].tau == pytest.approx(78 / 34)
    assert (whole["a"].alpha, whole["a"].tau_predicted) == (0.7, 3.0)
    assert whole["b"].alpha is None  # expected at another temperature than decoded
    assert (whole["c"].tau, whole["c"].alpha) == (None, 0.7)
    assert whole["prompt_lookup"].objective is None
    korean = next(run for run in runs if run.label == "a" and run.language == "ko")
    assert (korean.objective, korean.tau, korean.alpha) == ("rkl", 39 / 15, None)


def test_what_a_bench_expected_stands_alone_beside_what_training_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree's bench has no closed formula: the training's is of another draft and other texts."""
    monkeypatch.chdir(tmp_path)
    run = distilled(Path("runs/a"), alpha=0.6, tau_predicted=2.4, decoding_temperature=0.0)
    bench = benched(Path("bench"), "independent:runs/a")
    found = {"alpha": 0.33, "tau_predicted": None}
    entry = {"name": "independent:runs/a", "temperature": 0.0, "expected": found}
    write_json_atomic(bench / "summary.json", {"target": "t", "drafters": [entry]})
    whole = next(run for run in read_runs([run, bench]) if run.language is None)
    assert (whole.alpha, whole.tau_predicted) == (0.33, None)


@pytest.mark.parametrize("with_records", [True, False])
def test_a_summary_without_a_list_of_drafters_is_refused(
    tmp_path: Path, with_records: bool
) -> None:
    bench = benched(tmp_path / "bench", "prompt_lookup")
    if not with_records:
        (bench / "records.jsonl").unlink()
    write_json_atomic(bench / "summary.json", {"target": "t", "drafters": 5})
    with pytest.raises(InputError, match=r"summary\.json.*drafters"):
        read_runs([bench])


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ["x"]},
        {"temperature": "cold"},
        {"temperature": None},
        {"expected": 5},
        {"tokens_per_step": "x"},
        {"lossy_rule": 3},
    ],
)
def test_a_wrong_value_of_a_summary_is_refused_with_its_file(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    entry = {"name": "prompt_lookup", "temperature": 0.0, "tokens_per_step": 2.2}
    bench = benched(tmp_path / "bench", "prompt_lookup")
    write_json_atomic(bench / "summary.json", {"target": "t", "drafters": [{**entry, **wrong}]})
    with pytest.raises(InputError, match=r"in .*summary\.json"):
        read_runs([bench])


def test_a_drafter_of_a_like_name_elsewhere_is_not_taken_for_the_distilled_one(
    tmp_path: Path,
) -> None:
    a = distilled(tmp_path / "runs" / "draft", alpha=0.7)
    bench = benched(tmp_path / "bench", "independent:models/base/draft", "independent:.../draft")
    whole = {run.label: run for run in read_runs([a, bench]) if run.language is None}
    assert whole["independent:base/draft"].objective is None
    # outside of the bench's folder only the name is kept
    assert (whole["draft"].objective, whole["draft"].tau) == ("rkl", pytest.approx(78 / 34))


def test_labels_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    folders = [distilled(tmp_path / name, alpha=0.5) for name in ("x/final", "y/final", "z")]
    assert [run.label for run in read_runs(folders)] == ["x/final", "y/final", "z"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"alpha": "high"}, "alpha in .*run.json: expected float or none, got 'high'"),
        ({"beams": 8.5}, "beams in .*run.json"),
        ({"top_k": "50"}, "top_k in .*run.json"),
        ({"seed": True}, "seed in .*run.json"),
        ({"alpha": 70.0}, "alpha must be between 0 and 1"),
        ({"by_language": {"ko": {"alpha": "x"}}}, "alpha in .*run.json, by_language, ko"),
        ({"by_language": {"ko": 3}}, "expected an object in .*by_language, ko"),
        ({"by_language": 3}, "by_language in .*run.json"),
        ({"objective": None}, "no figures to compare"),
    ],
)
def test_wrong_values_are_refused_with_the_file(
    tmp_path: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        read_runs([distilled(tmp_path / "odd", **wrong)])
    assert "odd" in str(caught.value)


OUTSIDE = {"steps": 1, "tokens": 1, "accepted": 0, "offered": 0}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seconds": -1.0}, "seconds must be 0 or more, got -1.0"),
        ({"turn": -1}, "turn must be 0 or more"),
        ({"decode_seconds": 1e9}, "prefill_seconds and decode_seconds make"),
        ({"phases": {"draft": 9, "target": 1, "verify": 0, "other": 0}}, "phases add up to 10"),
        ({"phases": {"draft": -1, "target": 2, "verify": 0, "other": 0}}, "phases.draft must be"),
        ({"costs": {"baseline": -1, "draft": 0, "target": 0}}, "costs.baseline must be"),
        ({"tokens": 60}, "tokens is 60, but 20 steps accepted 20"),
        ({"decode_tokens": 41}, "decode_tokens is 41, above tokens"),
        ({"decode_steps": 20}, "decode_steps is 20, but steps 20"),
        ({"loop_tokens": 41}, "loop_tokens is 41, above tokens"),
        ({"accepted": 51, "steps": 1}, "accepted is 51, above tokens"),
        ({"offered": 19}, "accepted is 20, above offered"),
        ({"proposed": 49}, "offered is 50, above proposed"),
        ({"by_position": [[20, 19]]}, "by_position adds up to other"),
        ({"by_position": [[19, 20]]}, "20 of 19 accepted at depth 0"),
        ({"by_origin": {"0": 21}}, "by_origin adds up to 21"),
        ({"by_origin": {"0": 21, "1": -1}}, "by_origin.1 must be"),
        ({"by_source": {"suffix": 21}}, "by_source adds up to 21"),
        ({"outside_loops": {"steps": 1, "tokens": 2, "accepted": 3, "offered": 4}}, "outside_loop"),
        ({"seconds_outside_loops": 0.1}, "seconds_outside_loops is 0.1, but outside_loops is not"),
        (
            {"seconds_outside_loops": 99.0, "outside_loops": OUTSIDE},
            "seconds_outside_loops is 99.0, above decode_seconds",
        ),
        ({"divergence": {"at": 41, "gap": 0, "bound": 0}}, "divergence.at is 41"),
        ({"identical": False}, "identical is False, which divergence contradicts"),
    ],
)
def test_a_record_that_contradicts_itself_is_named_by_line_and_field(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    bench = benched(tmp_path / "bench", "prompt_lookup")
    path = bench / "records.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | changed)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=rf"records\.jsonl, line 3: .*{said}"):
        read_runs([bench])


def test_a_record_that_stands_twice_is_named_by_both_lines(tmp_path: Path) -> None:
    """As `cat` of a file with itself leaves it: intervals would shrink."""
    bench = benched(tmp_path / "bench", "prompt_lookup")
    path = bench / "records.jsonl"
    lines = path.read_text().splitlines()
    lines = [json.dumps(json.loads(one) | {"repeat": n}) for n, one in enumerate(lines)]
    path.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(InputError, match=rf"line {len(lines) + 1} repeats .*, line 2: leave one"):
        read_runs([bench])


def test_folders_that_hold_no_run_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is no folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(InputError, match="holds no run"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text('{"results": ', encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json: .*column 13"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json holds no JSON object"):
        read_runs([tmp_path])
    (tmp_path / "run.json").write_text('{"verb": "distill"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json has no results"):
        read_runs([tmp_path])
    with pytest.raises(InputError, match="no runs to compare"):
        compare([])


def test_folders_become_a_comparison(tmp_path: Path) -> None:
    folders = [
        distilled(
            tmp_path / f"{objective}{seed}", objective=objective, seed=seed, alpha=alpha + seed / 50
        )
        for objective, alpha in (("kl", 0.6), ("rkl", 0.7))
        for seed in (0, 1)
    ]
    comparison = write_comparison(read_runs(folders), tmp_path / "out")
    (scope,) = comparison.scopes
    assert scope.ranked_by == "alpha"
    assert [(entry.name, entry.seeds) for entry in scope.entries] == [
        ("reverse KL", 2),
        ("forward KL", 2),
    ]
    assert (tmp_path / "out" / "comparison.html").is_file()
