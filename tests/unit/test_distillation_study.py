"""The study of DistillBeam draws each figure from the rows that belong to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_models import tiny_model, tiny_tokenizer

from draftsmith.bench.compare.model import Scope, compare
from draftsmith.bench.compare.plots import controlled
from draftsmith.bench.loops import count_outside, in_loops
from draftsmith.config import as_dict
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.types import TreeShape
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.errors import InputError
from draftsmith.provenance import jsonable
from draftsmith.targets.hf import HFTarget

STUDY = Path(__file__).parents[2] / "benchmarks" / "distillation"
SOFT = {"kl", "rkl", "jsd", "hellinger", "tvd", "tvdpp", "lk"}
SHORT = ("rate", "temperature", "forcing", "sft", "beams", "draws", "tails", "aggregate", "length")
"""Short runs and long ones; those of `auto` are written out, or a target would have to be asked its
cost."""


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield


def a_lab(folder: Path, *, quick: bool = False) -> Any:
    """The study in this folder, with one prompt."""
    import distillbeam
    from lab import Lab, keep
    from study import Models

    asked = folder / "ask.jsonl"
    asked.write_text('{"id": "a", "prompt": "one"}\n')
    for name in ("target", "draft"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_text(name)
    models, amounts = Models(folder=folder), distillbeam.QUICK if quick else distillbeam.FULL
    return Lab(
        models=models,
        work=folder,
        learn=asked,
        ask=asked,
        amounts=amounts,
        kept=keep(folder / "record", folder, models, (asked,), amounts.prompts),
    )


def some_marks(*tokens: int, steps: int = 10, temperature: float = 0.0) -> Any:
    """Make scores of prompts that take so many steps each."""
    from evaluation import Decoded, Scores

    decoded = Decoded(
        shape=TreeShape.chain(8),
        temperature=temperature,
        tokens=tokens,
        steps=(steps,) * len(tokens),
    )
    alpha = {f"{temperature:g}": 0.4}
    return Scores(exam="", decoded=(decoded,), alpha=alpha, chrf=None, bleu=None)


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> Scope:
    """Every short run that the study plans has made-up scores: nothing is trained."""
    import distillbeam
    from beam_parts import PARTS
    from study import Evaluated
    from writing import as_row

    lab = a_lab(tmp_path_factory.mktemp("study"))
    runs = [lab.models.base, *(run for part in SHORT for run in PARTS[part](lab))]
    runs += [
        lab.run(f"beams-{width}@1500", "kl", label=f"kl, {width}, equal cost") for width in (2, 4)
    ]
    rows: list[dict[str, Any]] = []
    for place, run in enumerate({run.name: run for run in runs}.values()):
        marks = some_marks(1600 + place, steps=1000, temperature=1.0)
        rows.append(as_row(Evaluated(run=run, marks=marks)))
    comparison = compare(distillbeam.compared(rows, 0.3, lab))
    assert comparison.notes == ()  # no run is taken for another
    (only,) = comparison.scopes
    return only


def lines_of(
    scope: Scope, factor: str, ignoring: tuple[str, ...] = (), **wanted: object
) -> dict[str, set[object]]:
    """Values of each objective's line among those whose options are the wanted ones."""
    usual = {"limit": None, "aggregate": "per_beam"} | wanted
    out: dict[str, set[object]] = {}
    for line in controlled(scope, factor, ignoring):
        setting = next(iter(line.entries.values())).setting
        options = dict(setting.options) | {"forcing": setting.forcing}
        if all(options[name] == value for name, value in usual.items()):
            assert setting.objective is not None and setting.objective not in out
            out[setting.objective] = set(line.entries)
    return out


def test_every_setting_has_its_own_name(scope: Scope) -> None:
    names = [entry.name for entry in scope.entries]
    assert len(set(names)) == len(names)


def test_long_runs_do_not_stand_beside_short_ones(scope: Scope) -> None:
    limits = {dict(entry.setting.options).get("limit") for entry in scope.entries}
    assert limits == {None, 1500}  # those of `length` learn from 12,000 prompts


def test_every_objective_has_a_bar_for_every_forcing(scope: Scope) -> None:
    found = lines_of(scope, "forcing", ("beams",), tail="bucket")
    assert found == {key: {"gold", "greedy", "sample", "beam"} for key in {*SOFT, "sft"}}
    drawn = controlled(scope, "forcing", ("beams",))[:8]
    assert {next(iter(line.entries.values())).setting.objective for line in drawn} == set(found)


def test_temperatures_have_their_one_and_whole_laws_their_cut_ones(scope: Scope) -> None:
    found = lines_of(scope, "teacher_temperature", tail="renormalise")
    assert found == {key: {0.7, 1.0, 2.0} for key in SOFT}
    found = lines_of(scope, "truncation", tail="renormalise")
    assert found == {key: {"top-50", "full"} for key in SOFT}


def test_widths_at_equal_cost_do_not_join_those_on_all_prompts(scope: Scope) -> None:
    found = lines_of(scope, "beams", forcing="beam", beam_weights="uniform")
    assert found == {key: {1, 2, 4, 8, 16} for key in SOFT}
    assert lines_of(scope, "beams", limit=1500) == {"kl": {2, 4}}


def test_three_seeds_of_a_tail_are_pooled(scope: Scope) -> None:
    found = {
        entry.seeds
        for entry in scope.entries
        if dict(entry.setting.options).get("tail") == "floor"
        or dict(entry.setting.options).get("reading") == "uniform"
    }
    assert found == {3}


def test_marks_of_a_run_by_other_options_are_refused(tmp_path: Path) -> None:
    """A name does not say everything: what was trained at another rate is no part of the study."""
    import study

    lab = a_lab(tmp_path, quick=True)
    run = lab.run("greedy", "kl")
    assert run.options is not None
    options = jsonable(as_dict(run.options))
    options["training"]["learning_rate"] = 3e-5
    run.options.out.mkdir(parents=True)
    (run.options.out / "run.json").write_text(json.dumps({"options": options}))
    (run.options.out.parent / f"marks-{lab.exam.key[:12]}.json").write_text("{}")
    with pytest.raises(InputError, match=r"training.learning_rate.*3e-05.*study"):
        study.examine([run], lab.exam, tmp_path, 1)


def test_what_costs_otherwise_is_no_other_run() -> None:
    from study import _deciding

    said = {"drafter": "hass", "drafter_option": ["seed=0", "recompute=false"], "seed": 1}
    assert _deciding(said) == {"drafter_option": "seed=0", "seed": 1}
    assert _deciding({"model": {"target": "x", "dtype": "y"}}) == {"model.dtype": "y"}


def test_the_best_of_a_language_is_chosen_by_other_sentences_than_its_gain_is_of() -> None:
    from languages import best_run, gain
    from study import Evaluated, Run

    def examined(name: str, tokens: tuple[int, ...]) -> Evaluated:
        return Evaluated(run=Run(name=name), marks=some_marks(*tokens))

    base = examined("undistilled", (20, 20, 20, 20))
    lucky = examined("lucky-s0", (30, 32, 22, 22))
    assert best_run([base, lucky, examined("steady-s0", (28, 28, 28, 28))]) == lucky.run
    found = gain(base, [lucky, examined("lucky-s1", (10, 10, 24, 24))])
    assert (found.better, found.worse, found.seeds) == ("lucky", "undistilled", (2, 1))
    assert (found.ratio, found.low, found.high) == pytest.approx((1.15, 1.1, 1.2))


def test_settings_of_direct_alignment_meet_what_they_differ_from_in_one_thing() -> None:
    from alignment import rivals

    assert rivals("kl-400", 400) == ["undistilled"]
    assert rivals("tvdpp-400", 400) == ["undistilled", "kl-400", "tvd-400"]
    assert rivals("tvdpp-unmixed-400", 400) == ["undistilled", "tvdpp-400"]
    assert rivals("tvdpp-uniform-unmixed-400", 400) == ["undistilled", "tvdpp-uniform-400"]


def test_claims_are_about_runs_that_the_study_makes(tmp_path: Path) -> None:
    from beam_parts import AT_EQUAL_COST, costs_path, planned
    from claims import claims

    lab = a_lab(tmp_path)
    without = claims(lab)
    costs_path(lab).parent.mkdir()
    costs_path(lab).write_text(json.dumps(dict.fromkeys(AT_EQUAL_COST, 10.0)))
    made = {run.name: run.options for run in planned(lab)}
    found = claims(lab)
    assert len(found) - len(without) == len(AT_EQUAL_COST) - 1
    assert all(made[run.name] == run.options for one in found for run in one.runs)
    assert all(len(one.better) == len(one.worse) for one in found)
    assert len({one.says for one in found}) == len(found)


def test_a_claim_is_a_ratio_of_means_and_a_count_of_settings() -> None:
    from claims import Claim, judged
    from study import Run

    known = {name: some_marks(n, n) for name, n in zip("abcd", (30, 10, 20, 12), strict=True)}
    a, b, c, d = (Run(name=name, given="none") for name in "abcd")
    claim = Claim(says="more", better=(a, b), worse=(c, d))
    (one,) = judged([claim], known)
    assert one["ratio"] == one["low"] == one["high"] == 1.25  # (3 + 1) / (2 + 1.2)
    assert (one["higher"], one["of"]) == (1, 2)
    assert judged([claim], {"a": known["a"]}) == []
    known["b"] = some_marks(0, 20)
    (one,) = judged([claim], known)
    assert one["low"] < one["ratio"] == 1.25 < one["high"]


@pytest.mark.full
def test_a_study_goes_on_from_its_marks_where_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were run on several machines meet in one record; nothing is trained again."""
    import distillbeam
    from claims import claims
    from lab import keep

    monkeypatch.setattr(distillbeam, "loop_shares", lambda exam: {"0": 0.25})  # reads the target
    lab = a_lab(tmp_path, quick=True)
    first, second, *_ = claims(lab)
    for claim, expected in ((first, [first.says]), (second, [first.says, second.says])):
        for run in claim.runs:
            lab.kept.add(run, lab.exam, some_marks(30, temperature=1.0))
        kept = keep(tmp_path / "record", tmp_path, lab.models, (lab.ask,), lab.amounts.prompts)
        lab = replace(lab, kept=kept, work=tmp_path / "elsewhere")
        asked = lab.known([run for one in claims(lab) for run in one.runs], lab.exam)
        assert asked.keys() >= {run.name for run in claim.runs}
        examined = lab.examine(claim.runs, lab.exam, 1)  # there are no models that could learn
        assert [one.run for one in examined] == list(claim.runs)
        (tmp_path / "record" / "cost_ratio.json").write_text('{"draft_ms": 1, "target_ms": 4}')
        distillbeam.write(lab, tmp_path)
        record = json.loads((tmp_path / "distillbeam.json").read_text())
        assert [one["says"] for one in record["claims"]] == expected
        assert (record["cost_ratio"], record["loop_share"]) == (0.25, {"0": 0.25})
        assert {row["name"] for row in record["runs"]} >= {run.name for run in claim.runs}


def test_marks_count_for_the_same_run_alone(tmp_path: Path, capsys: Any) -> None:
    from lab import keep

    lab = a_lab(tmp_path)
    run = lab.run("greedy", "kl")
    lab.kept.add(run, lab.exam, some_marks(30))
    assert lab.kept.find(run, lab.exam) == some_marks(30)
    assert lab.kept.find(run, lab.final_exam) is None
    faster = replace(lab, learning_rate=3e-3).run("greedy", "kl")
    assert faster.name == run.name and lab.kept.find(faster, lab.exam) is None
    lab.kept.add(run, lab.exam, some_marks(31))
    with lab.kept.path.open("a") as file:
        file.write('{"run": "half a li')
    again = keep(tmp_path / "record", tmp_path, lab.models, (lab.ask,), lab.amounts.prompts)
    assert again.find(run, lab.exam) == some_marks(31)
    (tmp_path / "draft" / "model.safetensors").write_text("another")
    with pytest.raises(InputError, match="other models"):
        keep(tmp_path / "record", tmp_path, lab.models, (lab.ask,), lab.amounts.prompts)
    (tmp_path / "new").mkdir()
    other = keep(tmp_path / "record", tmp_path / "new", lab.models, (lab.ask,), lab.amounts.prompts)
    assert other.find(run, lab.exam) is None
    assert "1 of 1 exams in marks.jsonl are of other models" in capsys.readouterr().err


def test_speeds_are_of_the_drafts_and_models_that_they_were_measured_with(tmp_path: Path) -> None:
    import beam_speed

    lab = a_lab(tmp_path)
    drafts = {"undistilled": lab.models.base, "best": lab.run("draws-4", "lk")}
    assert beam_speed.measured(lab) == {} and not beam_speed.is_measured(lab, drafts)
    rows = [{"draft": name} for name in drafts]
    path = lab.kept.path.with_name("speed.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for of, there in ((lab.kept.of, True), ("other weights", False)):
        path.write_text(json.dumps({"of": of, "rows": rows}))
        assert beam_speed.is_measured(lab, drafts) is there
    path.write_text(json.dumps({"of": lab.kept.of, "rows": rows}))
    assert not beam_speed.is_measured(lab, {**drafts, "better": lab.run("draws-4", "kl")})


def test_finalists_of_each_kind_come_from_what_is_known(tmp_path: Path) -> None:
    import distillbeam

    lab = a_lab(tmp_path)
    lengthened = [run.name for run in distillbeam.length(lab)]
    assert lengthened == [
        f"draws-{count}@12000-{objective}-3840-s0"
        for objective in ("lk", "sft")
        for count in (1, 4)
    ] + [f"draws-{count}@12000-lk-whole-3840-s0" for count in (1, 4)]
    assert [run.name for run in distillbeam.finalists(lab)] == lengthened
    for place, (store, objective) in enumerate(
        [
            ("gold", "sft"),
            ("greedy", "kl"),
            ("draws-1", "tvd"),
            ("beams-4", "kl"),
            ("draws-4", "lk"),
            ("draws-16", "lk"),  # more than is read twice
        ]
    ):
        lab.kept.add(lab.run(store, objective), lab.exam, some_marks(30 + place))
    best = [run.name for run in distillbeam.finalists(lab)[:3]]
    assert sorted(best) == [
        "draws-1@12000-tvd-3840-s0",
        "draws-4@12000-lk-3840-s0",
        "gold@12000-sft-3840-s0",
    ]
    for place, run in enumerate(distillbeam.finalists(lab)):
        lab.kept.add(run, lab.exam, some_marks(40 - place))
    asked = distillbeam.compared_at_last(lab)
    assert {kind: len(runs) for kind, runs in asked.items()} == {
        "undistilled": 1,
        "sft": 3,
        "one": 3,
        "several": 3,
    }
    assert distillbeam.answers(lab)["differences"] == []


def an_exam(folder: Path, prompts: int, limit: int) -> Any:
    from evaluation import Evaluation

    asked = folder / "exam.jsonl"
    asked.write_text("".join(f'{{"id": "{n}", "prompt": "one"}}\n' for n in range(prompts)))
    return Evaluation(target="", prompts=asked, limit=limit, max_new_tokens=14, batch_size=2)


def test_an_exam_with_fewer_prompts_than_asked_for_is_said(tmp_path: Path, capsys: Any) -> None:
    from study import examine

    examine([], an_exam(tmp_path, 27, 48), tmp_path, 1)
    said = capsys.readouterr().err
    assert "exam.jsonl" in said and "27" in said and "48" in said
    examine([], an_exam(tmp_path, 48, 48), tmp_path, 1)
    assert capsys.readouterr().err == ""


def test_an_exam_counts_what_lies_in_loops_and_what_is_drafted_outside(tmp_path: Path) -> None:
    from evaluation import Decoded, count

    target = HFTarget(tiny_model().double(), tiny_tokenizer(), end_ids=frozenset({0}))
    drafter = PromptLookup()
    drafter.bind(target)
    exam, shape = an_exam(tmp_path, 3, 3), TreeShape.chain(3)
    prompts = [(7 + i, 8, 9, 7 + i, 8) for i in range(3)]
    found = count(exam, target, drafter, prompts, shape, 0.0)
    options = DecodeOptions(max_new_tokens=exam.max_new_tokens, shape=shape)
    for row, prompt in enumerate(prompts):
        steps = list(decode(target, drafter, [prompt], options))
        looped = in_loops([token for step in steps for token in step.emitted[0]])
        later = steps[1:]
        assert found.tokens[row] == sum(len(step.emitted[0]) for step in later)
        assert found.steps[row] == len(later)
        assert found.accepted[row] == sum(step.accepted[0] for step in later)
        assert found.offered[row] == sum(step.offered_depth[0] for step in later)
        assert found.loop_tokens[row] == looped[len(steps[0].emitted[0]) :].sum()
        assert found.outside[row] == count_outside(steps, 0, looped)
    assert sum(found.loop_tokens) > 0
    assert found.around_loops["loop_share"] == round(sum(found.loop_tokens) / sum(found.tokens), 4)
    line = json.loads(json.dumps(jsonable(as_dict(found))))
    assert Decoded.from_json(line) == found
    old = {name: line[name] for name in ("shape", "temperature", "tokens", "steps")}
    assert Decoded.from_json(old).around_loops == {}, "not known is not zero"
    assert found.of(slice(1)).outside == found.outside[:1]


def test_a_difference_says_how_many_prompts_it_is_of_and_which_rejections_are_saved() -> None:
    from writing import difference

    base, better = some_marks(10, 20, 30), some_marks(20, 20, 30)
    alphas = [replace(better, alpha={"0": alpha, "1": 0.9}) for alpha in (0.5, 0.6)]
    found = difference("a", alphas, "b", [base])
    assert (found.prompts, found.seeds) == (3, (2, 1))
    assert found.rejections_saved == {
        "0": 0.25
    }  # 0.55 against 0.4; of T = 1 one side knows nothing
    (way,) = base.decoded
    counted = replace(way, accepted=(1, 1, 1), offered=(2, 2, 2))
    none = [replace(one, alpha={}) for one in (base, better)]
    assert difference("a", none[1:], "b", none[:1]).rejections_saved == {}
    one, other = (
        replace(base, alpha={}, decoded=(replace(counted, accepted=(n,) * 3),)) for n in (2, 1)
    )
    assert difference("a", [one], "b", [other]).rejections_saved == {"chain 8, T = 0": 1.0}


def test_pictures_of_divergences_show_as_many_runs_of_each(tmp_path: Path) -> None:
    """Every run is a dot; a picture with a run missing is not drawn."""
    import beam_plots

    stores = [store for some in beam_plots.GROUPS.values() for store in some]
    names = [f"{store}-{one}-480-s0" for one in sorted(SOFT) for store in stores]
    names += [f"{store}-sft-480-s0" for store in beam_plots.ONE]
    marks = {name: some_marks(10 + place, 20) for place, name in enumerate(names)}
    (axis,) = beam_plots._objectives(marks, 480).axes
    dots = [some for some in axis.collections if type(some).__name__ == "PathCollection"]
    heights = sorted(float(height) for some in dots for _, height in some.get_offsets())
    wanted = sorted(marks[f"{s}-{one}-480-s0"].mean_tau for one in SOFT for s in stores)
    assert heights == pytest.approx(wanted)
    (axis,) = beam_plots._forcing(marks, 480).axes
    assert len(axis.containers) == 3 * (len(SOFT) + 1)
    beam_plots.save_pictures(marks, 480, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"objectives", "forcing"}
    beam_plots.save_pictures(dict(list(marks.items())[1:]), 480, tmp_path / "less")
    assert not (tmp_path / "less").exists()
