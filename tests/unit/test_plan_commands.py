"""`draftsmith plan` from the command line: the JSON that programs read, files, and refusals."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_cases import ran

import draftsmith
from draftsmith import cli
from draftsmith.core.speedup import tokens_per_step
from draftsmith.plan import tables
from draftsmith.plan.observations import DATA

SIZES = ["--target-params", "12853473280", "--target-tokens", "180B", "--draft-tokens", "1.8e11"]
OBSERVED = str(DATA / "acceptance.csv")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a verb: its JSON, or the sentence it failed with."""

    def run(*words: str, code: int = 0) -> Any:
        return ran(capsys, "plan", *words, "--json", code=code)

    return run


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pairs with the perplexities that Table 3 was computed with."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    lines = [
        f"{one.target},{one.draft},{one.target_ppl},{one.draft_ppl},{one.alpha}"
        for one in tables.pairs()
    ]
    path.write_text("\n".join(["target,draft,target_ppl,draft_ppl,alpha", *lines]) + "\n")
    return path


def test_a_law_is_fitted_and_an_optimum_found_with_it(
    plan: Any, corrected: Path, tmp_path: Path
) -> None:
    pytest.importorskip("statsmodels")
    law = plan("law", "--observations", str(corrected), "--fixed-effects", "--predict", "18,10")
    assert [round(law[name], 6) for name in "ABC"] == [-0.0067, 0.012971, 0.642084]
    assert set(law["se"]) == set(law["ci95"]) == {"A", "B", "C"}
    assert law["n"] == 130 and law["warnings"] == [] and len(law["cov"]) == 3
    assert round(law["r2"], 6) == 0.602296 and round(law["mse"], 6) == 0.001284
    curve = law["per_target"]["OPT-13B"]["power"]
    assert set(curve) == {"params", "moe", "ci95", "mse", "r2"} and len(curve["ci95"][0]) == 2
    assert law["errors"]["cluster_target"]["se"]["B"] > 4 * law["se"]["B"]
    assert law["predictions"][0]["pi95"][0] < law["predictions"][0]["alpha"]
    (tmp_path / "law.json").write_text(json.dumps(law))
    best = plan("optimum", *SIZES, "--law", str(tmp_path / "law.json"))
    assert best["se"] == pytest.approx(0.077e8, rel=0.01)
    low, high = best["ci95"]
    assert low < best["n_opt"] < high
    assert high - low == pytest.approx(2 * 1.96 * best["se"], rel=0.01)


def test_one_target_has_curves_and_no_law(plan: Any, corrected: Path, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    header, *lines = corrected.read_text().splitlines()
    files = {}
    for target in ("OPT-13B", "OPT-66B"):
        folder = tmp_path / target
        folder.mkdir()
        own = [line for line in lines if line.startswith(f"{target},")]
        (folder / "observations.csv").write_text("\n".join([header, *own]) + "\n")
        files[target] = str(folder)
    alone = plan("law", files["OPT-13B"], "--out", str(tmp_path / "out"))
    assert [alone[name] for name in ("A", "B", "C", "cov", "se")] == [None] * 5
    assert "B cannot be told from C" in alone["warnings"][0]
    assert list(alone["per_target"]) == ["OPT-13B"]
    both = plan("law", *files.values())
    assert both["A"] < 0 and both["per_target"]["OPT-13B"] == alone["per_target"]["OPT-13B"]
    assert (tmp_path / "out" / "curves.svg").exists()
    said = plan("optimum", *SIZES, "--law", str(tmp_path / "out" / "law.json"), code=2)
    assert "option A in" in said and "law.json: expected float, got None" in said
    said = plan("law", files["OPT-13B"], "--predict", "18,10", code=2)
    assert "B cannot be told from C" in said and files["OPT-13B"] in said
    assert "holds no observations.csv" in plan("law", str(tmp_path), code=2)


def test_two_perplexities_of_one_model_are_named(plan: Any) -> None:
    pytest.importorskip("statsmodels")
    said = plan("law", OBSERVED)["warnings"]
    assert len(said) == 2
    assert said[0].startswith("Qwen2.5-32B has 2 perplexities (9.549574852, 10.11350441)")


def test_the_optimum_of_table_5_in_every_spelling(plan: Any) -> None:
    spelt = [
        plan("optimum", *SIZES),
        plan("optimum", *SIZES, "--coefficients", "-0.0067,0.012971,0.642084"),
        plan("optimum", *SIZES[:3], "180000000000.0", "--draft-tokens", "0.18T"),
        plan("optimum", *SIZES, "--loss", "1.8172,482.01,0.3478,2085.43,0.3658"),
    ]
    assert all(one == spelt[0] for one in spelt)
    best = spelt[0]
    assert best["n_opt"] == pytest.approx(117313808.6, rel=1e-7)
    assert f"{best['throughput']:.3e}" == "1.009e-10"
    assert best["ratio"] == best["n_opt"] / 12853473280
    assert best["ci95"] is None and best["warnings"] == [] and best["draft"] is None
    whole = plan("optimum", *SIZES, "--integer")
    assert whole["gamma"] == 8 and isinstance(whole["gamma"], int)
    assert whole["speedup"] < best["speedup"]


def test_a_draft_that_one_has_is_set_beside_the_best(plan: Any) -> None:
    by_size = plan("optimum", *SIZES, "--draft-params", "350M")
    slower = plan("optimum", *SIZES, "--draft-params", "350M", "--cost-ratio", "0.1")
    assert by_size["n_opt"] == slower["n_opt"]
    assert 1 < slower["draft"]["speedup"] < by_size["draft"]["speedup"] < by_size["speedup"]
    useless = plan("optimum", *SIZES, "--draft-params", "350M", "--cost-ratio", "0.9")
    assert useless["draft"]["speedup"] == 1 and "does not make" in useless["warnings"][0]


def test_no_size_costs_less_than_the_measured_floor(plan: Any) -> None:
    by_size = plan("optimum", *SIZES)
    low = plan("optimum", *SIZES, "--cost-floor", "0.001")
    assert low["n_opt"] == by_size["n_opt"]
    at = plan("optimum", *SIZES, "--cost-floor", "0.05")
    assert at["ratio"] == pytest.approx(0.05) and at["ci95"] is None
    assert 1 < at["speedup"] < by_size["speedup"] and "measured cost of 0.05" in at["warnings"][0]


def test_where_no_draft_pays_the_answer_is_plain_decoding(plan: Any) -> None:
    never = plan("optimum", *SIZES, "--coefficients", "-0.1,0,0.88")
    assert never["n_opt"] is None and never["speedup"] == 1
    assert never["throughput"] == 1 / (2 * 12853473280)


def test_small_targets_are_extrapolations(plan: Any) -> None:
    sizes = ["--target-params", "1B", "--target-tokens", "1T", "--draft-tokens", "1T"]
    assert "extrapolated" in plan("optimum", *sizes)["warnings"][0]
    own = plan("optimum", *sizes, "--coefficients", "-0.007,0.01,0.7")
    assert own["warnings"] == []


def test_the_sweep_has_both_rules_and_the_power_law(plan: Any, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    found = plan("sweep", "--grid", "paper", "--out", str(tmp_path))
    assert set(found) == {"table8", "table9", "power_law", "warnings"}
    assert found["warnings"] == []
    assert {"mu", "M0", "gamma", "gamma_prime", "r2", "r2_adj", "n"} < set(found["table8"])
    assert f"{found['table9']['mu']:.2e}" == "2.71e-03"
    assert round(found["power_law"]["exponent"], 3) == 0.578
    assert len((tmp_path / "optima.csv").read_text().splitlines()) == 289
    for name in ("optima.png", "size_laws.svg", "run.json"):
        assert (tmp_path / name).stat().st_size > 0
    versions = json.loads((tmp_path / "run.json").read_text())["versions"]
    assert versions["scipy"] and versions["statsmodels"]


def test_alpha_from_a_histogram(plan: Any, tmp_path: Path) -> None:
    lines = ["gamma,accepted_length,count"]
    for gamma in range(1, 10):
        for n in range(gamma + 1):
            lines.append(f"{gamma},{n},{2 ** (20 - n - (n < gamma))}")
    (tmp_path / "counts.csv").write_text("\n".join(lines))
    found = plan("alpha", "--counts", str(tmp_path / "counts.csv"), "--out", str(tmp_path / "a"))
    for name in ("acceptance.png", "acceptance.svg", "figures.md", "run.json"):
        assert (tmp_path / "a" / name).stat().st_size > 0
    assert found["least_squares"]["alpha"] == pytest.approx(0.5, abs=1e-12)
    assert found["mle"]["alpha"] == 0.5
    assert len(found["mle"]["ci95"]) == len(found["least_squares"]["ci95"]) == 2
    assert found["iid_p_value"] == pytest.approx(1.0)
    assert found["tokens_per_step"]["9"] == float(tokens_per_step(0.5, 9))


def test_a_fitted_loss_law_can_be_planned_with(plan: Any, tmp_path: Path) -> None:
    lines = ["params,tokens,loss"]
    for N in (1e7, 1e8, 1e9, 1e10):
        for D in (1e9, 1e10, 1e11, 1e12):
            lines.append(f"{N:g},{D / 1e9:g}B,{2 + 300 / N**0.35 + 900 / D**0.33}")
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    out = ["--out", str(tmp_path / "fit")]
    found = plan("fit", str(tmp_path / "runs.csv"), "--bootstrap", "20", *out)
    for name in ("losses.png", "losses.svg", "figures.md", "run.json"):
        assert (tmp_path / "fit" / name).stat().st_size > 0
    assert found["nu"] == pytest.approx(0.35, rel=1e-3)
    best = plan("optimum", *SIZES, "--loss", found["loss"])
    assert best["n_opt"] != pytest.approx(117313808.6, rel=0.01)
    assert math.isfinite(best["speedup"])


# 5 is drawn longest; its rows are compared below, too
@pytest.mark.parametrize("number", list("123465789"))
@pytest.mark.every(4)
def test_every_table_is_recomputed_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    pytest.importorskip("statsmodels")
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "table", number, "--out", str(tmp_path)])
    assert end.value.code == 0
    assert f"Table {number}." in capsys.readouterr().out
    with (tmp_path / f"table_{number}.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row.get("agrees", "yes") == "yes" for row in rows)
    assert list((tmp_path / f"table_{number}").glob("*.png"))
    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("number", list("123456789"))
def test_every_table_agrees_with_the_paper(plan: Any, number: str) -> None:
    pytest.importorskip("statsmodels")
    (table,) = plan("table", number)["tables"]
    assert table["rows"] and all(row.get("agrees", "yes") == "yes" for row in table["rows"])


def test_sizes_of_table_4_and_table_8(plan: Any) -> None:
    pytest.importorskip("statsmodels")
    (fourth,) = plan("table", "4")["tables"]
    assert len(fourth["rows"]) == 39 and len(fourth["rows"][0]) == 14
    (eighth,) = plan("table", "8")["tables"]
    assert len(eighth["rows"]) == 19 and eighth["number"] == 8


def test_the_law_is_drawn_and_kept(plan: Any, corrected: Path, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    law = plan("law", str(corrected), "--out", str(tmp_path / "law"))
    assert json.loads((tmp_path / "law" / "law.json").read_text()) == law
    for name in ("plane.png", "curves.svg", "run.json"):
        assert (tmp_path / "law" / name).stat().st_size > 0
    captions = (tmp_path / "law" / "figures.md").read_text()
    assert captions.count("\n![") == 2 and "](curves.png)" in captions
    assert "95 % margins" in captions and "# Acceptance rate by perplexities" in captions
    own = ["--law", str(tmp_path / "law" / "law.json"), "--out", str(tmp_path / "best")]
    plan("optimum", *SIZES, *own, "--draft-params", "125M")
    assert (tmp_path / "best" / "speedup_by_size.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimum", *SIZES[:4], "--draft-tokens", "180G"], "--draft-tokens must be a count"),
        (["optimum", "--target-params", "-5", *SIZES[2:]], "--target-params must be a count"),
        (["optimum", *SIZES, "--coefficients", "1,2"], "--coefficients takes A,B,C"),
        (["optimum", *SIZES, "--coefficients", "1,2,nan"], "--coefficients takes A,B,C"),
        (["optimum", *SIZES, "--coefficients", "a,2,3"], "--coefficients: expected floats"),
        (["optimum", *SIZES, "--coefficients", "1,2,3", "--law", "x.json"], "exclude each other"),
        (["optimum", *SIZES, "--law", "absent.json"], "cannot read the law absent.json"),
        (["optimum", *SIZES, "--loss", "1,2,3,4"], "--loss takes E,A,nu,B,delta"),
        (["optimum", *SIZES, "--loss", "1,2,-3,4,5"], "--loss: the five constants are 0 or more"),
        (["optimum", *SIZES, "--cost-ratio", "0.1"], "--cost-ratio does nothing without"),
        (["optimum", *SIZES, "--draft-params", "13B"], "--draft-params must be below"),
        (["optimum", *SIZES, "--draft-params", "1M", "--cost-ratio", "0"], "--cost-ratio must be"),
        (["optimum", *SIZES, "--cost-floor", "nan"], "--cost-floor must be"),
        (["optimum", *SIZES, "--draft-params", "1000"], "it does not hold there"),
        (["optimum", *SIZES[:4]], "needs --draft-tokens"),
        (["law", OBSERVED, "--predict", "18"], "--predict takes DRAFT_PPL,TARGET_PPL"),
        (["law", OBSERVED, "--predict", "18,0.5"], "perplexities are 1 or more"),
        (["law", OBSERVED, "--predict", "1e10,1e10"], "--predict: perplexities"),
        (["optimum", *SIZES, "--cost-floor", "1e300"], "--cost-floor must be"),
        (
            ["optimum", *SIZES, "--draft-params", "1M", "--cost-ratio", "1e-320"],
            "--cost-ratio must be",
        ),
        (["law", "absent.csv"], "cannot read absent.csv"),
        (["sweep", "--grid", "mine"], "--grid must be one of paper, printed, exact"),
        (["table", "10"], "--number must be one of"),
        (["fit", OBSERVED], "has no column 'params'"),
        (["fit", OBSERVED, "--bootstrap", "1"], "--bootstrap must be at least 20"),
        (["fit", OBSERVED, "--bootstrap", "1000000000"], "--bootstrap must be at most"),
        (["alpha", OBSERVED], "has no column 'gamma'"),
        (["sweep", "--coefficients", "0,0,-1"], "has an acceptance rate between 0 and 1"),
        (["optimum", *SIZES[:4], "--draft-tokens", "0.5"], "--draft-tokens must be a count of 1"),
        (["optimum", *SIZES, "--coefficients", "-0.0067,0.0129,1.05"], "no best draft size"),
        (["optimun"], "did you mean 'optimum'"),
    ],
)
def test_what_cannot_be_planned_is_said(plan: Any, words: list[str], said: str) -> None:
    assert said in plan(*words, code=2)


def test_too_few_pairs_name_the_file(plan: Any, tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("target,draft,target_ppl,draft_ppl,alpha\na,b,10,20,0.6\n")
    said = plan("law", str(path), code=2)
    assert str(path) in said and "four rows or more, got 1" in said


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"mse": 1e-3, "n": 10**400}, "'n'"),
        ({"mse": 1e308, "n": 40}, "'mse'"),
        ({"cov": [[1e308, 0, 0], [0, 1e308, 0], [0, 0, 1e308]]}, "'cov'"),
    ],
)
def test_a_scaling_law_file_beyond_all_sense_is_refused(
    plan: Any, tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    path = tmp_path / "law.json"
    path.write_text(json.dumps({"A": -0.0067, "B": 0.013, "C": 0.64, **more}))
    said = plan("optimum", *SIZES, "--law", str(path), code=2)
    assert str(path) in said and named in said


@pytest.mark.parametrize("power", [300, -300])
def test_losses_beyond_all_sense_are_refused(plan: Any, tmp_path: Path, power: int) -> None:
    path = tmp_path / "runs.csv"
    rows = [f"1e{i},1e{i + 1},{3 + i}e{power}" for i in range(6, 14)]
    path.write_text("\n".join(["params,tokens,loss", *rows]) + "\n")
    said = plan("fit", str(path), code=2)
    assert "row 1 (line 2), column 'loss'" in said


def test_what_has_no_value_is_left_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Equal rates explain nothing: R2 has no value."""
    pytest.importorskip("statsmodels")
    path = tmp_path / "pairs.csv"
    rows = [f"t{i},d{j},{9 + i},{12 + 2 * j},0.5" for i in range(4) for j in range(4)]
    path.write_text("\n".join(["target,draft,target_ppl,draft_ppl,alpha", *rows]) + "\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "law", str(path)])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "R2" in out and "nan" not in out


def test_planning_loads_no_torch() -> None:
    """Neither its modules nor a verb; `length_policy` and what belongs to decoding may."""
    folder = Path(draftsmith.__file__).parent / "plan"
    ours = """acceptance fit ladder observations optimum plots sweep tables""".split()
    assert all((folder / f"{name}.py").exists() for name in ours)
    modules = [f"draftsmith.plan.{name}" for name in ours]
    verbs = "law optimum sweep alpha fit table".split()
    modules += [f"draftsmith.commands.plan.{verb}" for verb in verbs]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
