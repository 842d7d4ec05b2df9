"""What a run was told belongs to its setting: only the seed may differ between seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.small_study import a_run, only_scope

from draftsmith.bench.compare.model import Scope, compare, read_runs, say_option
from draftsmith.commands.distill import DistillOptions
from draftsmith.config import as_dict
from draftsmith.distill.config import (
    BadPromptConfig,
    DivergenceConfig,
    FittingConfig,
    ScheduleConfig,
)
from draftsmith.errors import InputError
from draftsmith.provenance import write_json_atomic


def a_distillation(
    folder: Path,
    *,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    objective: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
) -> Path:
    """A finished run with run.json as `distill` writes it."""
    usual: dict[str, Any] = {
        "store": (Path("stores/draws"),),
        "drafter": "models/d",
        "out": folder,
    }
    told = DistillOptions(
        target="models/t",
        objective=DivergenceConfig(**{"objective": "tvdpp", **(objective or {})}),
        training=ScheduleConfig(**{"duration": "240steps", **(training or {})}),
        seed=seed,
        **{**usual, **(options or {})},
    )
    found = {
        "objective": told.objective.objective,
        "teacher_temperature": told.objective.teacher_temperature,
        "tail": told.objective.tail,
        "forcing": "sample",
        "beams": 1,
        "top_k": 50,
        "seed": seed,
        "alpha": 0.7 + 0.01 * seed,
        "data": [["shard", "abc"]],
        **(results or {}),
    }
    content = {"verb": "distill", "seed": seed, "options": as_dict(told), "results": found}
    write_json_atomic(folder / "run.json", content)
    return folder


def the_scope(*folders: Path) -> Scope:
    (scope,) = compare(read_runs(folders)).scopes
    return scope


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "tail": ({"objective": {"tail": "floor"}}, "tail floor"),
    "reading": ({"objective": {"reading": "sampled"}}, "reading sampled"),
    "beta": ({"objective": {"beta": 0.25}}, "beta 0.25"),
    "aggregate": ({"options": {"aggregate": "mixture"}}, "aggregate mixture"),
    "weights": ({"options": {"beam_weights": "score"}}, "beam weights score"),
    "text": ({"options": {"text": ("a.txt", "b.txt")}}, "text a.txt, b.txt"),
    "drafter": ({"options": {"drafter": "models/random"}}, "drafter models/random"),
    "steps": ({"training": {"duration": "3840steps"}}, "duration 3840steps"),
    "rate": ({"training": {"learning_rate": 3e-3}}, "learning rate 0.003"),
    "decay": ({"training": {"betas": (0.9, 0.999)}}, "betas 0.9, 0.999"),
    "store": ({"results": {"data": [["shard", "other"]]}}, "store draws ("),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_are_no_other_seed(tmp_path: Path, name: str) -> None:
    change, said = OTHERS[name]
    first = a_distillation(tmp_path / "a")
    other = a_distillation(tmp_path / "b", seed=1, **change)
    scope = the_scope(first, other)
    assert [entry.seeds for entry in scope.entries] == [1, 1]
    assert scope.entries[0].name.startswith(f"TVD++, {said}")
    assert scope.entries[0].name != scope.entries[1].name
    scope = the_scope(first, other, a_distillation(tmp_path / "c", seed=2, **change))
    assert [entry.seeds for entry in scope.entries] == [2, 1]


def test_where_results_go_and_how_the_work_is_divided_makes_no_setting(tmp_path: Path) -> None:
    first = a_distillation(tmp_path / "a")
    same = a_distillation(
        tmp_path / "elsewhere" / "b",
        seed=1,
        options={
            "json": True,
            "report_to": "tensorboard",
            "save_every": 7,
            "bad_prompts": BadPromptConfig(on_bad_prompt="error"),
            "store": (Path("../stores/draws"),),  # the same files, from another folder
            "fitting": FittingConfig(on_bad_shard="skip"),  # and the same shards of it
        },
        training={"gradient_checkpointing": True},
    )
    (entry,) = the_scope(first, same).entries
    assert (entry.name, entry.seeds, entry.setting.options) == ("TVD++", 2, ())


def test_what_follows_from_another_option_is_not_said_with_it(tmp_path: Path) -> None:
    long = {"duration": "3840steps", "warmup": 192}
    scope = the_scope(a_distillation(tmp_path / "a"), a_distillation(tmp_path / "b", training=long))
    assert {entry.name for entry in scope.entries} == {
        "TVD++, duration 240steps",
        "TVD++, duration 3840steps",
    }
    names = {name for entry in scope.entries for name, _ in entry.setting.options}
    assert names == {"training.duration", "training.warmup"}


def test_only_settings_that_share_a_name_are_told_apart_by_options() -> None:
    def options(tail: str, steps: int) -> tuple[tuple[str, str | int], ...]:
        return (("tail", tail), ("steps", steps))

    scope = only_scope(
        [
            a_run("a", options=options("bucket", 240)),
            a_run("b", options=options("floor", 240)),
            a_run("c", options=options("floor", 960)),
            a_run("d", beams=8, options=options("floor", 960)),
        ]
    )
    assert {entry.name for entry in scope.entries} == {
        "forward KL, 4 beams, tail bucket, steps 240",
        "forward KL, 4 beams, tail floor, steps 240",
        "forward KL, 4 beams, tail floor, steps 960",
        "forward KL, 8 beams",
    }


def test_an_option_that_is_not_recorded_is_no_known_one() -> None:
    scope = only_scope([a_run("a", options=(("tail", "bucket"),)), a_run("b", seed=1)])
    assert sorted(entry.name for entry in scope.entries) == [
        "forward KL, tail bucket",
        "forward KL, tail unknown",
    ]


def test_where_a_file_holds_no_options_its_results_say_some(tmp_path: Path) -> None:
    folders = []
    for seed, (tail, steps) in enumerate((("bucket", 240), ("floor", 3840))):
        results = {"objective": "tvdpp", "tail": tail, "steps": steps, "alpha": 0.7}
        folders.append(tmp_path / tail)
        write_json_atomic(folders[-1] / "run.json", {"seed": seed, "results": results})
    assert sorted(entry.name for entry in the_scope(*folders).entries) == [
        "TVD++, tail bucket",
        "TVD++, tail floor",
    ]


def test_options_that_are_no_object_are_refused_with_their_file(tmp_path: Path) -> None:
    content = {"options": 3, "results": {"objective": "kl", "alpha": 0.7}}
    write_json_atomic(tmp_path / "run.json", content)
    with pytest.raises(InputError, match=r"run\.json.*got 3\b"):
        read_runs([tmp_path])


def test_an_undistilled_draft_was_told_nothing() -> None:
    runs = [a_run(tail, options=(("tail", tail),)) for tail in ("bucket", "floor")]
    scope = only_scope([*runs, a_run("base", objective="none", tau=2.0)])
    assert scope.base is not None and scope.base.setting.options == ()
    assert scope.base.name == "no distillation"


def test_options_in_words() -> None:
    options = (("training.learning_rate", 3e-4), ("online", True), ("text", None))
    assert say_option("training.learning_rate", options) == "learning rate 0.0003"
    assert say_option("online", options) == "online on"
    assert say_option("text", options) == "text none"
    assert say_option("hold_out", options) == "hold out unknown"
