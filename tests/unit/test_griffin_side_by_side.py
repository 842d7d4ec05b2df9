"""The whole table on one GPU: what waits for what, what is tried again, and when it ends."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from griffin_table import side_by_side


def work(out: Path, **changed: Any) -> Any:
    given: dict[str, Any] = {
        **{"out": out, "data": None, "target": "model", "device": "cpu", "seconds": None},
        **{"at_once": 2, "kinds": "hass,fspad,medusa", "seeds": 2, "seeded": "hass"},
        **{"go_on": None, "steps": 3, "processes": 2, "samples": 1, "texts": "", "prompts": None},
        **{"limit": 1, "max_new_tokens": 8, "batch_size": 2},
    }
    return side_by_side.SideBySide(argparse.Namespace(**{**given, **changed}))


def test_texts_come_first_then_trainings_then_cells_whose_drafter_is_there(tmp_path: Path) -> None:
    side = work(tmp_path, go_on="hass:folder")
    names = [job.name for job in side.jobs]
    assert names[:5] == ["hass-0", "fspad-0", "medusa-0", "hass-1", "hass-on"]
    cells = names[5:]
    assert {"cell-1-HASS-T0", "cell-0-Medusa-typical-T1", "cell-0-PLD-T0"} < set(cells)
    assert not {"cell-1-FSPAD-T0", "cell-1-PLD-T0", "cell-0-GRIFFIN-T0"} & set(cells)
    heats = [name[-1] for name in cells]
    assert heats == sorted(heats) and len(set(names)) == len(names)
    jobs = {job.name: job for job in side.jobs}
    assert jobs["hass-0"].needs == ()
    assert jobs["fspad-0"].needs == side.stores and len(side.stores) == 2
    assert "1e-3" in jobs["fspad-0"].words and "2e-3" in jobs["hass-1"].words
    assert "--drafters" in jobs["cell-1-HASS-T0"].words
    assert "--drafters" not in jobs["cell-0-PLD-T0"].words, "there may be none yet"
    assert "hass:folder" in jobs["hass-on"].words
    assert jobs["cell-0-PLD-T0"].needs == side.stores, "the prompts of all wait for no drafter"
    drafter, prompts = jobs["cell-1-HASS-T0"].needs
    assert drafter == tmp_path / "drafters-1" / "hass-2e-3"
    assert prompts == tmp_path / "table-1" / "prompts.json"
    makes_prompts = [
        job.name for job in side.jobs[5:] if "prompts.json" not in [path.name for path in job.needs]
    ]
    assert makes_prompts == cells[:1]


def test_what_is_done_is_kept(tmp_path: Path) -> None:
    first = work(tmp_path)
    made = next(job for job in first.jobs if job.name == "fspad-0").makes
    made.parent.mkdir(parents=True)
    made.touch()
    again = [job.name for job in work(tmp_path).jobs]
    assert "fspad-0" not in again and len(again) == len(first.jobs) - 1
    with pytest.raises(SystemExit, match="--steps 3"):
        work(tmp_path, steps=4)


def touching(name: str, makes: Path, needs: tuple[Path, ...] = ()) -> Any:
    code = f"import pathlib; pathlib.Path({str(makes)!r}).touch()"
    return side_by_side.Job(name=name, words=("-c", code), needs=needs, makes=makes)


def test_a_job_waits_for_what_it_needs_and_is_tried_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = work(tmp_path)
    for store in side.stores:
        store.parent.mkdir(parents=True)
        store.touch()
    one, two, never = tmp_path / "one", tmp_path / "two", tmp_path / "never"
    code = f"import pathlib; pathlib.Path({str(one)!r}).rename({str(two)!r})"
    side.jobs = [
        side_by_side.Job(name="second", words=("-c", code), needs=(one,), makes=two),
        touching("first", one),
        side_by_side.Job(name="wrong", words=("-c", "raise SystemExit(3)"), needs=(), makes=never),
        touching("behind", tmp_path / "behind", (never,)),
    ]
    assert side.run() == 2, "what failed, and what waits for it"
    said = capsys.readouterr().out
    assert said.count("wrong FAILED (3)") == 2
    assert "second ended" in said and "second FAILED" not in said
    assert (
        "not done: wrong" in said
        and "not done: behind" in said
        and not (tmp_path / "behind").exists()
    )


def test_without_texts_it_ends_at_once(tmp_path: Path) -> None:
    side = work(tmp_path)
    side.jobs = [
        side_by_side.Job(
            name="texts", words=("-c", "raise SystemExit(1)"), needs=(), makes=tmp_path / "x"
        ),
        touching("training", tmp_path / "y", side.stores),
    ]
    with pytest.raises(SystemExit, match="without texts"):
        side.run()


def test_it_ends_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    side = work(tmp_path, seconds=0.5)
    sleeps = ("-c", "import time; time.sleep(600)")
    side.jobs = [side_by_side.Job(name="long", words=sleeps, needs=(), makes=tmp_path / "x")]
    assert side.run() == 1
    assert "the time is over, 1 still run" in capsys.readouterr().out
    assert side.running["long"][1].returncode is not None


def test_drafters_are_found_where_out_was_moved(tmp_path: Path) -> None:
    side = work(tmp_path / "before")
    made = next(job for job in side.jobs if job.name == "fspad-0").makes
    made.parent.mkdir(parents=True)
    made.touch()
    side.share()
    moved = (tmp_path / "before").rename(tmp_path / "behind")
    assert (moved / "drafters-0" / "fspad-1e-3" / "run.json").exists()
    assert list((moved / "drafters-0").iterdir()) == [moved / "drafters-0" / "fspad-1e-3"]


def test_tables_of_all_seeds_have_the_prompts_and_texts_of_the_first(tmp_path: Path) -> None:
    side = work(tmp_path)
    side.share()
    (tmp_path / "table-1" / "texts" / "T0.json").write_text("texts")  # whoever is first
    (tmp_path / "table-0" / "prompts.json").write_text("prompts")
    side.share()
    assert (tmp_path / "table-0" / "texts" / "T0.json").read_text() == "texts"
    assert (tmp_path / "table-1" / "prompts.json").read_text() == "prompts"
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert (moved / "table-1" / "texts" / "T0.json").read_text() == "texts"


def test_a_process_that_makes_nothing_has_failed(tmp_path: Path) -> None:
    side = work(tmp_path)
    for store in side.stores:
        store.parent.mkdir(parents=True)
        store.touch()
    side.jobs = [side_by_side.Job(name="idle", words=("-c", ""), needs=(), makes=tmp_path / "x")]
    assert side.run() == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--max-new-tokens 0", "--max-new-tokens must be at least 1"),
        ("--seconds 0", "--seconds must be above 0"),
        ("--kinds hass,hass", "each once"),
        ("--kinds hass --seeded fspad", "also of --kinds"),
        ("--prompts nowhere.json", "is no file"),
        ("--go-on hass", "KIND:FOLDER"),
        ("--texts=--steps=9", "gives that itself"),
    ],
)
def test_what_would_be_refused_hours_later_is_refused(
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--out", str(tmp_path / "out"), *words.split()])
    with pytest.raises(SystemExit):
        side_by_side.main()
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_the_other_programs_know_the_words_that_they_are_given(tmp_path: Path) -> None:
    for job in work(tmp_path, data=tmp_path).jobs:
        source = Path(job.words[0]).read_text(encoding="utf-8")
        given = [word for word in job.words if word.startswith("--")]
        assert given and all(f'parser.add_argument("{word}"' in source for word in given), job.name
