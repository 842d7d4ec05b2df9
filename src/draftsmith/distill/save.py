"""The end of a training run: figures and the model folder."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.distill.tokenizer_training import Subset
from draftsmith.distill.trainer import TrainReport
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.vocabulary import SUBSET_FILE
from draftsmith.errors import BackendError, DraftsmithError
from draftsmith.provenance import Run, is_write_failure, system_error

_DRAFTING = """
    draftsmith bench --target TARGET --drafter FOLDER --suite PROMPTS
"""
_LOADING = """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("FOLDER")
"""


def bits_per_byte(report: TrainReport, num_bytes: int) -> float:
    """Bits for all held-out tokens, end tokens included, over the UTF-8 bytes of the text."""
    nats = report.evaluation["loss"] * report.evaluation["tokens"]
    return nats / math.log(2) / num_bytes


def write_model(
    out: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    subset: Subset | None,
    dtype: torch.dtype,
    record: Run,
    results: Mapping[str, object],
    text: str,
) -> None:
    """Write the model folder: whole files, one by one, run.json last; BackendError (disk, rights).

    A reduced vocabulary is `draft_vocab.safetensors` with `d2t`: int64 [Vd], the target's id of
    each of the model's ids, and `unknown`: int64 [1], the model's id that any other token was
    fed as in training. `text`: of its README.
    """
    with _landing(out) as temporary:
        model = model.to(dtype)
        end_id = model.config.eos_token_id
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=end_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if subset is not None:
            tensors = {
                "d2t": torch.from_numpy(subset.ids).long(),
                "unknown": torch.tensor([subset.unknown]),
            }
            save_file(tensors, temporary / SUBSET_FILE)
        (temporary / "README.md").write_text(text + _LOADING, encoding="utf-8")
        _move(temporary, out)
        record.write(out, results=results)


def write_drafter(
    out: Path,
    drafter: Drafter,
    kind: str,
    dtype: torch.dtype,
    record: Run,
    results: Mapping[str, object],
    text: str,
) -> None:
    """As `write_model`, for a drafter with a network of its own; `draftsmith bench --drafter OUT`
    decodes with it."""
    with _landing(out) as temporary:
        drafter.to(dtype).save(temporary, kind=kind)
        (temporary / "README.md").write_text(text + _DRAFTING, encoding="utf-8")
        _move(temporary, out)
        record.write(out, results=results)


@contextlib.contextmanager
def _landing(out: Path) -> Iterator[Path]:
    """A folder for files that are not complete; BackendError for what the disk refuses."""
    temporary = out / f".tmp-model-{os.getpid()}"
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
    except Exception as error:
        # run.json comes with a sentence of its own, which does not know of the checkpoint
        cause = error.__cause__ if isinstance(error, DraftsmithError) else error
        if not (isinstance(cause, Exception) and is_write_failure(cause)):
            raise
        found = system_error(cause)
        raise BackendError(
            f"could not write the model to {out}: {found.strerror or found}; nothing was "
            "half-written and the training checkpoint is kept: make room and run the same command "
            "again"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(temporary: Path, out: Path) -> None:
    """Whole files, one by one."""
    usual = (temporary / "README.md").stat().st_mode
    for path in sorted(temporary.iterdir()):
        path.chmod(usual)  # safetensors gives its files to the owner alone
        with path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(path, out / path.name)


def readme(results: Mapping[str, object], subset: Subset | None) -> str:
    """What `pretrain` says about its model."""
    bits = results["bits_per_byte"]
    lines = [
        "# A model trained by `draftsmith pretrain`",
        "",
        f"{results['parameters']:,} parameters, {results['tokens']:,} tokens seen in "
        f"{results['steps']:,} steps. `run.json` says how it was made.",
        "",
    ]
    if isinstance(bits, float):
        lines += [f"Held-out text: {bits:.4f} bits per byte.", ""]
    if subset is not None:
        lines += [
            f"Its vocabulary is {len(subset.ids)} tokens of the target's; `{SUBSET_FILE}` holds "
            "their ids in the target's vocabulary (`d2t`). The tokenizer files are the target's.",
            "",
        ]
    return "\n".join(lines)
