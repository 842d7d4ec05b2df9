"""`doctor` measures and judges; what it prints as JSON is complete and names no folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftsmith.commands import doctor
from draftsmith.commands.doctor import DeviceReport, Diagnosis, DoctorOptions, TokenCost, _advice


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return doctor.examine(mebibytes=4, repeats=3)


def test_the_report_is_complete_json_without_folders(diagnosis: Diagnosis) -> None:
    payload = json.loads(json.dumps(diagnosis.json_payload(), allow_nan=False))
    assert payload["versions"]["torch"]
    cpu = payload["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["copy_gb_per_s"] > 0
    assert [cost["dtype"] for cost in cpu["costs"]] == ["float32", "bfloat16"]
    assert all(cost["ms_1_token"] > 0 and cost["ratio"] > 0 for cost in cpu["costs"])
    assert isinstance(cpu["fast_bfloat16"], bool)
    assert set(payload["extras"]) == {"train", "serve", "eval", "plan"}
    assert str(Path.cwd()) not in json.dumps(payload)
    assert str(Path.home()) not in json.dumps(payload["machine"])


def test_people_get_a_table_and_programs_do_not(
    diagnosis: Diagnosis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    assert doctor.run(DoctorOptions(json=True)) is diagnosis
    assert capsys.readouterr().out == ""
    doctor.run(DoctorOptions())
    out = capsys.readouterr().out
    assert "GB/s" in out
    assert "bfloat16" in out


def device(bfloat16_ms: float, eight: float) -> DeviceReport:
    def cost(dtype: str, one: float) -> TokenCost:
        return TokenCost(
            dtype=dtype,
            ms_1_token=one,
            ms_8_tokens=one * eight,
            weight_gb_per_s=9.6,
            ratio=eight,
        )

    costs = (cost("float32", 2.0), cost("bfloat16", bfloat16_ms))
    return DeviceReport(
        device="cpu", name="CPU", copy_gb_per_s=10, costs=costs, fast_bfloat16=False
    )


def advise(report: DeviceReport, *, threads: int = 2, train: bool = True, disk: float = 50) -> str:
    machine = {"torch_threads": threads, "cpus": 2}
    return "\n".join(_advice(machine, (report,), {"model cache": disk}, {"train": train}))


def test_advice_follows_from_the_measurements() -> None:
    good = advise(device(bfloat16_ms=1.0, eight=1.2))
    assert "--dtype bfloat16" in good
    assert "more than 1.2 tokens" in good
    assert "0.6 B: 8.0" in good, "9.6 GB/s over 1.2 GB of weights"
    assert "OMP_NUM_THREADS" not in good
    assert "pip install" not in good
    bad = advise(device(bfloat16_ms=3.0, eight=6.0), threads=8, train=False, disk=1.0)
    assert "--dtype float32" in bad
    assert "8 tokens cost 6.0 times" in bad
    assert "0.6 B: 4.0" in bad, "float32 has twice the bytes"
    assert "OMP_NUM_THREADS=2" in bad
    assert "pip install 'draftsmith[train]'" in bad
    assert "Only 1.0 GiB" in bad
