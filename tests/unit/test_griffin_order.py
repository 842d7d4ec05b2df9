"""Short continuations of trained drafters: what each is given, and what the table says of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from griffin_table import order


def test_every_setting_has_a_name_and_differs_in_one_thing() -> None:
    names = [one.name for one in order.SETTINGS]
    assert len(set(names)) == len(names)
    grid = {(one.kind, one.forwards, one.top) for one in order.SETTINGS if one.shows == "top-10"}
    assert grid == {(*network, top) for network in order.NETWORKS for top in (0.0, 0.5, 1.0)}
    for one in order.SETTINGS:
        words = one.words()
        assert words[words.index("--top-weight") + 1] == f"{one.top:g}"
        assert (f"num_forwards={one.forwards}" in words) == (
            one.kind in ("hass", "griffin", "unrolled")
        )
    (scaled,) = (one for one in order.SETTINGS if one.shows == "scale")
    plain = next(
        one for one in order.SETTINGS if (one.kind, one.forwards, one.top) == ("hass", 3, 0)
    )
    assert (scaled.noise, scaled.feature) == (2 * plain.noise, plain.feature / 2)


def test_hass_goes_on_from_a_copy_of_eagle_and_eagle_stays(tmp_path: Path) -> None:
    eagle = tmp_path / "drafters" / "eagle-2e-3"
    eagle.mkdir(parents=True)
    (eagle / "run.json").write_text("{}")
    manifest = {"kind": "eagle", "options": {"draft_vocab": 8192}}
    (eagle / "drafter.json").write_text(json.dumps(manifest))
    given = dict.fromkeys(order.KEPT, 1) | {"drafters": tmp_path / "drafters"}
    work = order.Work(argparse.Namespace(out=tmp_path / "out", **given))
    own = order.Setting(shows="top-10", kind="eagle")
    assert work.begun(own) == eagle
    copy = work.begun(order.Setting(shows="protocol", kind="hass", forwards=3, begun="eagle"))
    assert json.loads((copy / "drafter.json").read_text()) == manifest | {"kind": "hass"}
    assert json.loads((eagle / "drafter.json").read_text()) == manifest


def test_a_row_has_what_the_texts_said_before_and_after() -> None:
    def held_out(first: float, steps: float) -> dict[str, float]:
        return {f"accuracy_{n}": first / n for n in range(1, 6)} | {"tokens_per_step": steps}

    results = {"tokens": 64, "held_out_before": held_out(0.5, 1.5), "held_out": held_out(0.6, 1.7)}
    setting = order.Setting(shows="top-10", kind="fspad", top=1.0)
    row = order.row(setting, {"results": results})
    text = order.table([row])
    assert "| top-10 | fspad | 1 | 1 | fspad | 1.500 | 1.700 | 0.600 0.300 0.200" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        ([], "holds no trained eagle, fspad, hass, griffin"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = ["--drafters", str(tmp_path), "--stores", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["order.py", "--out", str(tmp_path / "out"), *folders, *words])
    with pytest.raises(SystemExit, match="2"):
        order.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
