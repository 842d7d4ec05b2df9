"""`draftsmith doctor`: what this machine is, what it can do, and what that means for speculation.

Decoding one token reads every weight once, so its speed is memory bandwidth; verifying several
drafted tokens reads the weights once too. How much dearer 8 tokens are than one is therefore what
decides whether drafting can pay, and it is measured here on one layer of a medium-sized model.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.commands._options import VerbOptions
from draftsmith.commands._tables import console, show, show_values
from draftsmith.provenance import free_bytes, jsonable, machine_summary, portable_text, versions

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(VerbOptions):
    """Report versions, devices, memory bandwidth and what will work on this machine."""


EXTRAS = {
    "train": ("accelerate", "tensorboard"),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "sse_starlette"),
    "eval": ("sacrebleu",),
    "plan": ("statsmodels",),
}
MODEL_SIZES = {"0.6 B": 0.6e9, "8 B": 8e9}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCost:
    """One weight matrix in one number format: milliseconds for 1 and for 8 tokens."""

    dtype: str
    ms_1_token: float
    ms_8_tokens: float
    weight_gb_per_s: float
    """Bytes of weights read per second with one token: the bandwidth that decoding gets."""
    ratio: float
    """Milliseconds for 8 tokens / for 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """What was measured on one device."""

    device: str
    name: str
    copy_gb_per_s: float
    """Bytes read plus bytes written while copying a block far larger than the caches."""
    costs: tuple[TokenCost, ...]
    fast_bfloat16: bool
    """Without instructions of its own bfloat16 is emulated, and slower than float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The whole report; `json_payload` is what `--json` prints."""

    versions: dict[str, str | None]
    machine: dict[str, Any]
    devices: tuple[DeviceReport, ...]
    engine: str
    """Instructions that the compiled engine uses on the CPU, or why it is not used."""
    packed_weights: dict[str, Any]
    """Where the engine keeps weights in its own form (`folder`), and how much is there (`gib`)."""
    free_disk_gib: dict[str, float]
    extras: dict[str, bool]
    advice: tuple[str, ...]

    def json_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = jsonable(self)
        return payload


def run(options: DoctorOptions) -> Diagnosis:
    """Examine the machine for a few seconds and report."""
    diagnosis = examine()
    if not options.json:
        _print(diagnosis)
    return diagnosis


def examine(*, mebibytes: int = 256, repeats: int = 7) -> Diagnosis:
    """Measure with blocks of about this size (larger than any cache) and gather the rest."""
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    reports = tuple(_examine_device(device, mebibytes, repeats) for device in devices)
    machine = machine_summary()
    disk = {"current folder": _free_gib(Path.cwd()), "model cache": _free_gib(Path(HF_HUB_CACHE))}
    extras = {name: all(map(importlib.util.find_spec, needs)) for name, needs in EXTRAS.items()}
    return Diagnosis(
        versions=versions(),
        machine=machine,
        devices=reports,
        engine=_engine(),
        packed_weights=_packed_weights(),
        free_disk_gib=disk,
        extras=extras,
        advice=tuple(_advice(machine, reports, disk, extras)),
    )


def _engine() -> str:
    from draftsmith.targets.native.bindings import NotBuilt
    from draftsmith.targets.native.weights import usable_library

    try:
        return usable_library().instructions
    except NotBuilt as error:
        return f"not used: {error}"


def _packed_weights() -> dict[str, Any]:
    from draftsmith.targets.native.packed import packed_folder

    folder = packed_folder()
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    return {"folder": portable_text(str(folder)), "gib": round(size / 2**30, 2)}


# --------------------------------------------------------------------------- measuring


def _examine_device(device: torch.device, mebibytes: int, repeats: int) -> DeviceReport:
    import torch

    size = mebibytes * 2**20
    source = torch.ones(size // 4, device=device)
    sink = torch.empty_like(source)
    (copying,) = _interleaved([partial(sink.copy_, source)], device, repeats)
    costs = tuple(
        _token_cost(dtype, device, size, repeats) for dtype in (torch.float32, torch.bfloat16)
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return DeviceReport(
        device=str(device),
        name=name,
        copy_gb_per_s=round(2 * size / copying / 1e9, 2),
        costs=costs,
        fast_bfloat16=_best(costs).dtype == "bfloat16",
    )


def _best(costs: tuple[TokenCost, ...]) -> TokenCost:
    """The number format to use: with drafts, the cost of several tokens is what counts."""
    return min(costs, key=lambda cost: cost.ms_8_tokens)


def _token_cost(dtype: torch.dtype, device: torch.device, size: int, repeats: int) -> TokenCost:
    # The same matrix in every format, of the given size in float32.
    import torch

    hidden = 2048
    rows = max(size // 4 // hidden, 8)
    weight_OH = torch.full((rows, hidden), 0.01, dtype=dtype, device=device)
    tokens = {count: torch.ones((count, hidden), dtype=dtype, device=device) for count in (1, 8)}

    forwards = [partial(torch.nn.functional.linear, tokens[n], weight_OH) for n in (1, 8)]
    with torch.inference_mode():
        one, eight = _interleaved(forwards, device, repeats)
    return TokenCost(
        dtype=str(dtype).removeprefix("torch."),
        ms_1_token=round(one * 1e3, 4),
        ms_8_tokens=round(eight * 1e3, 4),
        weight_gb_per_s=round(weight_OH.numel() * dtype.itemsize / one / 1e9, 2),
        ratio=round(eight / one, 3),
    )


def _interleaved(
    actions: Sequence[Callable[[], Tensor]], device: torch.device, repeats: int
) -> list[float]:
    """Median seconds of each action, measured A B A B after two unmeasured rounds."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times: list[list[float]] = [[] for _ in actions]
    for turn in range(repeats + 2):
        for action, measured in zip(actions, times, strict=True):
            finish()
            start = time.perf_counter()
            action()
            finish()
            if turn >= 2:
                measured.append(time.perf_counter() - start)
    return [max(statistics.median(measured), 1e-9) for measured in times]


# --------------------------------------------------------------------------- judging


def _advice(
    machine: dict[str, Any],
    devices: tuple[DeviceReport, ...],
    disk: dict[str, float],
    extras: dict[str, bool],
) -> list[str]:
    device = devices[-1]
    best = _best(device.costs)
    dtype = best.dtype
    rates = [
        f"{name}: {best.weight_gb_per_s * 1e9 / (size * (2 if dtype == 'bfloat16' else 4)):.1f}"
        for name, size in MODEL_SIZES.items()
    ]
    said = [
        f"Use --dtype {dtype} on {device.device}: several tokens at once cost least in it.",
        f"8 tokens cost {best.ratio:.1f} times as much as one: drafting 7 pays when a step gives "
        f"more than {best.ratio:.1f} tokens on average (cheap drafts provided).",
        f"Without drafts at most this many tokens per second: {', '.join(rates)}.",
    ]
    if (machine["torch_threads"] or 1) > machine["cpus"]:
        said.append(
            f"torch uses {machine['torch_threads']} threads on {machine['cpus']} processors: "
            f"set OMP_NUM_THREADS={machine['cpus']}."
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    # One busy thread is this very measurement.
    if load > machine["cpus"] * 0.5 + 1:
        said.append(f"Other programs keep this machine busy (load {load:.1f}): timings will swing.")
    said += [
        f"Only {free:.1f} GiB of disk are free for the {place}."
        for place, free in disk.items()
        if free < 5
    ]
    return said + [
        f"For `{name}` functions: pip install 'draftsmith[{name}]'"
        for name, there in extras.items()
        if not there
    ]


def _free_gib(folder: Path) -> float:
    return round(free_bytes(folder) / 2**30, 1)


# --------------------------------------------------------------------------- printing


def _print(diagnosis: Diagnosis) -> None:
    machine = diagnosis.machine
    found = [f"{name} {number}" for name, number in diagnosis.versions.items() if number]
    disk = [f"{free} GiB ({place})" for place, free in diagnosis.free_disk_gib.items()]
    extras = [f"{name} {'yes' if there else 'no'}" for name, there in diagnosis.extras.items()]
    show_values(
        "draftsmith doctor",
        {
            "machine": f"{machine['system']} {machine['architecture']}, {machine['cpu']}",
            "": f"{machine['cpus']} processors, {machine['memory_gib']} GiB memory",
            "threads of torch": machine["torch_threads"],
            "compiled engine": diagnosis.engine,
            "packed weights": "{folder} ({gib} GiB)".format(**diagnosis.packed_weights),
            "versions": ", ".join(found),
            "free disk": ", ".join(disk),
            "extras": ", ".join(extras),
        },
    )
    show(
        "measured",
        ("device", "format", "1 token", "8 tokens", "ratio", "weights", "copy"),
        [
            (
                f"{device.device} ({device.name})",
                cost.dtype,
                f"{cost.ms_1_token:.2f} ms",
                f"{cost.ms_8_tokens:.2f} ms",
                f"{cost.ratio:.2f}",
                f"{cost.weight_gb_per_s:.1f} GB/s",
                f"{device.copy_gb_per_s:.1f} GB/s",
            )
            for device in diagnosis.devices
            for cost in device.costs
        ],
    )
    for line in diagnosis.advice:
        console().print(f"* {line}")
