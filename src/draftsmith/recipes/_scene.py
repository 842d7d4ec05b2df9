"""What a quickstart needs before it begins: models, prompts, a folder of its own."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.bench.arms import Arm
from draftsmith.bench.costs import ForwardProbe
from draftsmith.bench.runner import Item
from draftsmith.drafting_options import DraftingOptions
from draftsmith.errors import BackendError, InputError
from draftsmith.option_groups import ModelOptions
from draftsmith.options import QuickstartOptions
from draftsmith.recipes._before_after import DRAFT_LENGTH
from draftsmith.recipes._drafting import encode, open_drafters, open_target
from draftsmith.recipes._out import refuse_file
from draftsmith.recipes._stdlib_prompts import held_out_prompts
from draftsmith.sampler import Sampler
from draftsmith.targets.hf import HFTarget

SMALL = Path("models/mini-code")
_ROOT = Path(__file__).resolve().parents[3]
"""Of a checkout; for a wheel, some folder that holds no such models."""
DISTILLED = "distilled"
"""Folder in OUT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What is there before anything is measured."""

    options: QuickstartOptions
    console: Console
    began: float
    """On the steady clock."""
    models: Path
    target: HFTarget
    draft: Arm
    """The shipped draft model."""
    rivals: tuple[Arm, ...]
    """Drafters without a model."""
    items: tuple[Item, ...]
    """Held-out prompts."""
    samplers: tuple[Sampler, ...]

    @property
    def source(self) -> str:
        """The target's folder."""
        return str(self.models / "target")

    @property
    def folder(self) -> Path:
        """For what is collected and distilled."""
        return self.options.out / DISTILLED


def set_scene(options: QuickstartOptions, num_prompts: int) -> Scene:
    """Load everything; with `num_prompts` prompts unless the user limits them.

    Raises:
        InputError: an --out that is used for something else, or no prompts on this machine.
        BackendError: models that are missing or damaged.
    """
    began = time.monotonic()
    models = find_models(options.models)
    check_out(options.out)
    prompts = held_out_prompts(options.limit or num_prompts)
    target = open_target(ModelOptions(target=str(models / "target")))
    return Scene(
        options=options,
        console=Console(highlight=False),
        began=began,
        models=models,
        target=target,
        draft=open_draft(models / "draft", target),
        rivals=open_drafters(("prompt_lookup", "lookahead"), DraftingOptions(), target),
        items=tuple(Item(prompt=p.id, tokens=encode(p, target)) for p in prompts),
        samplers=tuple(Sampler(temperature=t) for t in options.temperatures()),
    )


def open_draft(folder: Path, target: HFTarget) -> Arm:
    """A draft model that drafts as far as pays, which the distilled one may do further."""
    drafting = DraftingOptions(draft_length=DRAFT_LENGTH)
    (arm,) = open_drafters((f"independent:{folder}",), drafting, target)
    return arm


def choose_threads(scene: Scene) -> None:
    """Use one thread where several are slower: beside other programs they wait for each other."""
    many = torch.get_num_threads()
    if many == 1 or scene.target.device.type != "cpu":
        return
    probe = ForwardProbe(scene.target, scene.items[0].tokens, 1)
    seconds = {}
    for threads in (many, 1):
        torch.set_num_threads(threads)
        seconds[threads] = statistics.median([probe.seconds(1) for _ in range(9)])
    if seconds[1] > 0.8 * seconds[many]:
        torch.set_num_threads(many)
        return
    scene.console.print(f"One thread is faster than {many} here: using one.", style="dim")


# --------------------------------------------------------------------------- folders


def find_models(given: Path | None) -> Path:
    """The folder with `target` and `draft`.

    Raises:
        BackendError: it is not where it should be.
    """
    places = [given] if given is not None else [_ROOT / SMALL, SMALL]
    for place in places:
        if (place / "target" / "config.json").is_file() and (place / "draft").is_dir():
            here = Path.cwd()
            return place.relative_to(here) if place.is_relative_to(here) else place
    if given is not None:
        raise BackendError(f"--models {given} has no folders target and draft with models.")
    raise BackendError(
        "The small models are not here: they are in the folder models/mini-code of draftsmith's "
        "repository; run this from a checkout, or give the folder by --models."
    )


def check_out(out: Path) -> None:
    """InputError when `out` is a file or holds what no quickstart made."""
    refuse_file(out)
    if not (out / "records.jsonl").exists():
        if (out / DISTILLED).exists():
            raise InputError(
                f"--out {out} holds a folder {DISTILLED!r} that no quickstart made; give another."
            )
        return
    try:
        verb = json.loads((out / "run.json").read_text(encoding="utf-8"))["verb"]
    except (OSError, ValueError, KeyError, TypeError):
        verb = "quickstart"  # interrupted: it never came to its run.json
    if verb != "quickstart":
        raise InputError(f"--out {out} holds a measurement by `draftsmith {verb}`; give another.")


def clear(out: Path) -> None:
    """Make room for a new quickstart. records.jsonl goes last: it says that the rest is ours."""
    (out / "run.json").unlink(missing_ok=True)
    for name in ("report.html", "summary.json"):
        (out / name).unlink(missing_ok=True)
    for name in ("figures", DISTILLED):
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "records.jsonl").unlink(missing_ok=True)
