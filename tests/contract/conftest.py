"""The contract suite shares its processor with others, and its tensors are tiny."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
