"""The attention of the released training code of HASS and GRIFFIN, leak included: for parity with
what that code learns. It writes T x T scores out.

There, forward n = j + 1 reads feature sets 0 (the target's) .. j (drafts of drafts) in natural
coordinates, query pair t and key pair s. Scores are multiplied by 0/1 masks that choose the set,
and summed; the softmax runs over all T columns, and its weights are multiplied by the masks again.
A column that is in no mask has logit 0 instead of -inf: it takes the weight exp(0) and gives no
value, so the weights that count sum to less than 1. Forward 3 of a text of five pairs:

    natural    s 0 1 2 3 4     place of step 2
    t = 0        2 . . . .     none: this chain would begin before the text
        1        1 2 . . .     none
        2        0 1 2 . .     0   sees the text at 0,        its drafts of steps 1, 2;  leaks to 2
        3        0 0 1 2 .     1   sees the text at 0, 1,     its drafts of steps 1, 2;  leaks to 1
        4        0 0 0 1 2     2   sees the text at 0, 1, 2,  its drafts of steps 1, 2;  no leak
    5, 6: not in the text      3, 4   these never count

A digit is the set whose key is seen there, a dot a column of nobody's. Natural pair t is our place
t - j of step j: set i at s is the draft of step i of the chain from s - i, and every chain that a
row reads is its own. So our row is that of `ops.rollout` and one column more that stands for all
dots, with the logarithm of their number as its logit and no value; place t of step j has
T - (t + j + 1) dots. Rows without a place are read by no other row. (The released code learns from
them, too, if the first pairs of a text count, which in a chat are the template's.)

T is the text's own length, as if every text stood alone in its batch. The released code pads texts
to the longest of a batch, where padding leaks like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.ops.rollout import mixed_values, rollout_scores


def attend_rollout_official(
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    documents_BT: Tensor | None,
    dots_BT: Tensor,
    *,
    scale: float,
) -> Tensor:
    """As `attend_rollout`; `dots_BT`: columns of logit 0 that take weight and give no value."""
    scores = rollout_scores(query_BHTD, key_BHTD, own_keys, documents_BT, scale)
    wide = torch.promote_types(scores.dtype, torch.float32)
    leak = dots_BT.to(wide).log()[:, None, :, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores.to(wide), leak], dim=-1).softmax(-1)
    return mixed_values(weights[..., :-1].to(query_BHTD.dtype), value_BHTD, own_values)
