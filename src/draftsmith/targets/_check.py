"""The last net for wrong decoding: a few tokens through us and through the model alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draftsmith.cache import lay_out
from draftsmith.errors import BackendError, UnsupportedModel
from draftsmith.targets._admit import harmless_ids
from draftsmith.types import Signals

if TYPE_CHECKING:
    from draftsmith.targets.hf import HFTarget

# Largest disagreement with the model's own eager attention, in standard deviations of the logits.
# Eager attention takes its softmax in float32 even in float64; half precision adds up per layer
# (measured on 24 layers: float32 3e-6, float16 7e-3, bfloat16 6e-2).
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}

#     row 0   c c | p p p     tree   p(last) -+- 0 --- 1    compared in row 0
#     row 1   c c c | p p                     `- 2 --- 3    compared in row 1
_KNOWN, _COMMITTED, _PARENTS, _BRANCHES = 5, (2, 3), (-1, 0, -1, 2), ([0, 1], [2, 3])


def self_check(target: HFTarget, name: str) -> None:
    """Compare our cached tree attention with the model's own eager attention on a few tokens.

    Raises:
        UnsupportedModel: they disagree by more than the dtype explains.
        BackendError: the logits are not finite.
    """
    tolerance = _TOLERANCE.get(target.dtype, 0.2)
    ids = np.array(harmless_ids(target.config.to_dict(), 2 * (_KNOWN + len(_PARENTS))))
    known, tree = ids.reshape(2, -1)[:, :_KNOWN], ids.reshape(2, -1)[:, _KNOWN:]
    cache = target.new_cache(2, 2 * _KNOWN)
    started = [known[b, :n].tolist() for b, n in enumerate(_COMMITTED)]
    tokens, block = lay_out(cache, started)
    target.forward(torch.from_numpy(tokens), block, 1, Signals())
    cache.commit(np.array(_COMMITTED))
    pending = [known[b, n:].tolist() for b, n in enumerate(_COMMITTED)]
    tokens, block = lay_out(cache, pending, tree, np.array([_PARENTS, _PARENTS]))
    ours = target.forward(torch.from_numpy(tokens), block, 5, Signals()).logits_BNV
    texts = np.stack([[*known[b], *tree[b, nodes]] for b, nodes in enumerate(_BRANCHES)])
    with target.native("eager"), torch.inference_mode():
        theirs = target.model(
            input_ids=torch.from_numpy(texts).to(target.device), use_cache=False
        ).logits[:, _KNOWN - 1 :]
    ours = torch.stack([ours[b, [0, *(n + 1 for n in ns)]] for b, ns in enumerate(_BRANCHES)])
    error = _disagreement(ours, theirs)
    if bool(error.isnan().any()):
        raise BackendError(
            f"{name} gives NaN on a few ordinary tokens: its weights are broken, or "
            f"{str(target.dtype).removeprefix('torch.')} is too narrow for it."
        )
    # In half precision one token may take another expert at a near-tie: then most must agree.
    worst = float(error.median() if target.dtype.itemsize < 4 else error.max())
    if worst > tolerance:
        raise UnsupportedModel(
            f"{name} gives other logits with draftsmith's attention than with its own (off by "
            f"{worst:.2g} standard deviations, {tolerance:g} allowed): decoding would not be "
            "exact, so it is refused (check=False skips this comparison)."
        )


def _disagreement(ours_RNV: Tensor, theirs_RNV: Tensor) -> Tensor:
    """[R, N]: root mean square difference, in standard deviations of the reference logits."""
    ours, theirs = ours_RNV.double(), theirs_RNV.double()
    same = (ours == theirs) & theirs.isinf()  # forbidden tokens, in both
    gap = torch.where(same, 0.0, ours - theirs)
    spread = torch.where(theirs.isinf(), torch.nan, theirs)
    spread = (spread - spread.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()
    broken = ours.isnan().any(-1) | theirs.isnan().any(-1)
    error = gap.square().mean(-1).sqrt() / spread.clamp(min=1e-12)
    return torch.where(broken, torch.nan, error)
