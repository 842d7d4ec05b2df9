"""A transformers model of the Llama family, run by the C++ extension.

What it computes for a token depends on the token's own text and on nothing else, bit for bit: not
on how many tokens are fed at once, not on other rows, not on the branches of a tree. Drafting
therefore changes no logit, in any format of weights.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import Block, KVSpec
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.provenance import free_memory_bytes
from draftsmith.targets.native.library import Call, Layer, Model, address
from draftsmith.targets.native.weights import (
    GROUP,
    LANES,
    Blocks,
    Memory,
    PackedMatrix,
    pack,
    pack_blocks,
    usable_library,
)

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
FORMATS = ("float32", "bfloat16", "w8a8", "int8", "int4", "stored")
"""`stored`: blocks as a file holds them; matrices that it holds otherwise in bfloat16."""
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "w8a8": 1.0, "int8": 1.125, "int4": 0.75, "stored": 1.2}
"""Bytes of a packed weight, scales included; embedding and head are kept in more bits."""

Stored = Callable[[str], Blocks | None]
"""Name of a linear layer -> its matrix as a file holds it in blocks; None: not in blocks."""


def why_not(model: Any, windows: Sequence[int | None], form: str) -> str | None:
    """Why this model cannot be run here; None: it can."""
    config = model.config
    if config.model_type not in FAMILY:
        return f"its architecture ({config.model_type}) is not of the Llama family"
    if next(model.parameters()).device.type != "cpu":
        return "it is not on a CPU"
    if any(window is not None for window in windows):
        return "its attention has a window"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        return f"its rotary embedding ({rope}) changes with the length of the text"
    step = LANES if form in ("float32", "bfloat16") else GROUP
    width = model.model.layers[0].self_attn.head_dim
    for what, size, of in (
        ("hidden size", config.hidden_size, step),
        ("MLP", config.intermediate_size, step),
        ("heads together", width * config.num_attention_heads, step),
        ("head", width, 2 * LANES),
    ):
        if size % of:
            return f"its {what} is {size} wide, no multiple of {of}"
    return None


def too_large(model: Any, form: str) -> str | None:
    """Why this model cannot be packed beside its own weights; None: memory is there."""
    needed = _BYTES[form] * sum(weight.numel() for weight in model.parameters())
    free = free_memory_bytes()
    if free is not None and needed > free:
        return (
            f"its packed weights would take {needed / 2**30:.1f} GiB more memory, and "
            f"{free / 2**30:.1f} GiB are free"
        )
    return None


class Engine:
    """Runs forwards of `model`, whose weights are copied into the extension's memory.

    Args:
        model: a transformers model for which `why_not` is None.
        form: one of `FORMATS`.
        stored: blocks that a file holds, for `int4` and `int8`: taken as they are.

    Raises:
        NotBuilt: the extension cannot be built here.
    """

    def __init__(self, model: Any, form: str, *, stored: Stored | None = None) -> None:
        self._lib = usable_library()
        self.form = form
        self.instructions = self._lib.instructions
        self._stored = stored or (lambda name: None)
        self._names = {module: name for name, module in model.named_modules()}
        self._held: list[Memory] = []
        self._matrices: list[PackedMatrix] = []
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        self._hidden: int = config.hidden_size
        self._vocab: int = model.get_output_embeddings().weight.shape[0]
        self._rotary = decoder.rotary_emb
        self._turns = np.zeros((0, 0), dtype=np.float32), np.zeros((0, 0), dtype=np.float32)
        kv_heads, width = config.num_key_value_heads, attention.head_dim
        self._layers = (Layer * len(decoder.layers))(*map(self._layer, decoder.layers))
        head = self._packed([model.get_output_embeddings()], in_blocks=GROUP)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        embedding = head if tied else self._packed([model.get_input_embeddings()], in_blocks=GROUP)
        self.model = Model(
            layers=len(self._layers),
            hidden=self._hidden,
            heads=config.num_attention_heads,
            kv_heads=kv_heads,
            width=width,
            mlp=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
            layer=self._layers,
            norm_out=self._vector(decoder.norm.weight),
            embedding=embedding,
            head=head,
        )
        self._at = self._lib.c.ds_open(ctypes.byref(self.model))
        weakref.finalize(self, self._lib.c.ds_close, self._at)
        self.spec = KVSpec(
            layers=((kv_heads, width, width),) * len(self._layers),
            dtype=torch.float32 if form == "float32" else torch.bfloat16,
            device=torch.device("cpu"),
        )
        del self._names, self._stored

    @property
    def quantised(self) -> bool:
        """Some of its matrices are in 4 or 8 bits."""
        return any(matrix.format in ("int8", "int4") for matrix in self._matrices)

    @property
    def bytes(self) -> int:
        """Size of the matrices."""
        return sum(matrix.bytes for matrix in self._matrices)

    # ------------------------------------------------------------------ weights

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        self._held.append(Memory(self._lib, values.float()))
        return self._held[-1].at

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            norm_in=self._vector(layer.input_layernorm.weight),
            norm_mlp=self._vector(layer.post_attention_layernorm.weight),
            norm_q=self._vector(_weight(attention, "q_norm")),
            norm_k=self._vector(_weight(attention, "k_norm")),
            qkv=self._packed([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._packed([attention.o_proj]),
            gate_up=self._packed([mlp.gate_proj, mlp.up_proj], by_turns=True),
            down=self._packed([mlp.down_proj]),
        )

    def _packed(self, linears: Sequence[Any], *, by_turns: bool = False, in_blocks: int = 0) -> Any:
        """Layers with one input as one matrix: rows below each other, or panels of two by turns."""
        blocks = [self._usable(self._stored(self._names[linear])) for linear in linears]
        biases = [getattr(linear, "bias", None) for linear in linears]
        sizes = [linear.weight.shape[0] for linear in linears]
        order: Any = slice(None)
        if by_turns:
            order = torch.arange(sum(sizes)).view(2, -1, LANES).transpose(0, 1).flatten()
        bias = None
        if any(one is not None for one in biases):
            bias = torch.cat(
                [
                    torch.zeros(n) if one is None else one.float()
                    for one, n in zip(biases, sizes, strict=True)
                ]
            )[order]
        known = [one for one in blocks if one is not None]
        if len(known) == len(blocks) and len({one.least_RG is None for one in known}) == 1:
            whole = Blocks(
                numbers_RK=torch.cat([one.numbers_RK for one in known]),
                scale_RG=torch.cat([one.scale_RG for one in known]),
                least_RG=None
                if known[0].least_RG is None
                else torch.cat([one.least_RG for one in known if one.least_RG is not None]),
            )
            self._matrices.append(pack_blocks(self._lib, whole.take(order), bias))
        else:
            weight = torch.cat([linear.weight for linear in linears])[order]
            # the head decides which token follows, and an embedding is a row: 8 bits for both
            form = "int8" if self.form == "int4" and in_blocks else self.form
            form = "bfloat16" if form == "stored" else form
            self._matrices.append(pack(self._lib, weight, form, bias))
        return self._matrices[-1].c

    def _usable(self, blocks: Blocks | None) -> Blocks | None:
        if blocks is None or self.form == "stored":
            return blocks
        bits = "int8" if blocks.least_RG is None else "int4"
        return blocks if bits == self.form else None

    # ------------------------------------------------------------------ forward

    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        """As `Target.forward`; logits and signals in float32."""
        rows, width = tokens_BT.shape
        token = np.ascontiguousarray(np.asarray(tokens_BT), dtype=np.int64)
        position = np.ascontiguousarray(np.asarray(block.positions_BT), dtype=np.int32)
        see_BTC = np.asarray(block.see_BTC)
        row, _, column = np.nonzero(see_BTC)
        seen = block.columns_BC[row, column].astype(np.int32)
        seen_from = np.zeros(rows * width + 1, dtype=np.int32)
        np.cumsum(see_BTC.sum(-1).reshape(-1), out=seen_from[1:])
        if isinstance(block.slots_BT, int):
            slot = np.tile(np.arange(block.slots_BT, block.slots_BT + width, dtype=np.int32), rows)
        else:
            slot = np.ascontiguousarray(block.slots_BT, dtype=np.int32)
        at = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        row_of = np.repeat(np.arange(rows, dtype=np.int32), width)
        committed = block.lengths_B.astype(np.int32).repeat(width)
        logit_at = np.ascontiguousarray(at[:, -keep:])
        logits = torch.empty((rows, keep, -(-self._vocab // LANES) * LANES))
        layers = np.array(signals.layers, dtype=np.int32)
        kinds = len(layers) + signals.last_hidden
        signal = torch.empty((rows, width, kinds * self._hidden))
        cosine, sine = self._rotation(int(position.max(initial=0)) + 1)
        store = block.cache.whole()
        strides = store.stride()
        call = Call(
            threads=max(torch.get_num_threads(), 1),
            tokens=rows * width,
            num_logits=rows * keep,
            num_signals=len(layers),
            last_hidden=int(signals.last_hidden),
            token=address(token),
            position=address(position),
            row=address(row_of),
            slot=address(slot),
            committed=address(committed),
            seen_from=address(seen_from),
            seen=address(seen),
            cache=store.data_ptr(),
            layer_stride=strides[0],
            row_stride=strides[1],
            head_stride=strides[2],
            cache_bf16=int(store.dtype == torch.bfloat16),
            longest=int(block.lengths_B.max(initial=0)) + see_BTC.shape[-1],
            logit_at=address(logit_at),
            logits=logits.data_ptr(),
            signal_at=address(layers),
            signal=signal.data_ptr(),
            cosine=address(cosine),
            sine=address(sine),
        )
        self._lib.c.ds_forward(self._at, ctypes.byref(call))
        return TargetOutput(
            logits_BNV=logits[..., : self._vocab], signals_BTS=signal if kinds else None
        )

    def _rotation(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [positions, width / 2], as the model's own module computes them."""
        if len(self._turns[0]) < positions:
            count = max(256, 1 << (positions - 1).bit_length())
            probe = torch.zeros(1, 1, dtype=torch.float32)
            with torch.inference_mode():
                cosine, sine = self._rotary(probe, torch.arange(count)[None])
            half = cosine.shape[-1] // 2
            self._turns = cosine[0, :, :half].numpy().copy(), sine[0, :, :half].numpy().copy()
        return self._turns


def _weight(module: Any, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight
