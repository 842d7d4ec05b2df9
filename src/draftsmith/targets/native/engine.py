"""A transformers model of the Llama family, run by the C++ extension.

What it computes for a token depends on the token's own text and on nothing else, bit for bit: not
on how many tokens are fed at once, not on other rows, not on the branches of a tree. Drafting
therefore changes no logit, in any format of weights.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.core.cache import Block, KVCache, KVSpec
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.errors import InputError
from draftsmith.provenance import free_memory_bytes
from draftsmith.targets.native.bindings import Call, Chain, Layer, Library, Model
from draftsmith.targets.native.packed import PackedFile, Versions
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
from draftsmith.targets.threads import engine_threads

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
    return unfit(config, model.model.layers[0].self_attn.head_dim, form)


def unfit(config: Any, width: int, form: str) -> str | None:
    """Why a layer of these measures, with heads of `width`, cannot be run; None: it can."""
    if width % (2 * LANES):
        return f"its head is {width} wide, no multiple of {2 * LANES}"
    return uneven(
        form,
        {
            "hidden size": config.hidden_size,
            "MLP": config.intermediate_size,
            "heads together": width * config.num_attention_heads,
        },
    )


def uneven(form: str, sizes: Mapping[str, int]) -> str | None:
    """Why matrices of rows as wide as these cannot be packed; None: they can."""
    step = LANES if form in ("float32", "bfloat16") else GROUP
    wrong = ((what, size) for what, size in sizes.items() if size % step)
    return next((f"its {what} is {size} wide, no multiple of {step}" for what, size in wrong), None)


def engine_of(target: object) -> Engine | None:
    """What runs the target's forwards; None: PyTorch does."""
    engine: Engine | None = getattr(target, "compiled", None)
    return engine


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """How the tokens of a chain are drawn: by inverting the cumulative sum of
    softmax(logits / temperature) at these uniform numbers, one per token."""

    temperature: float
    uniform_BN: np.ndarray
    """[B, steps] in [0, 1)."""


class LogitDraws:
    """Draws from rows of logits (a `DrawsFromLogits` of core/short_walks.py)."""

    def __init__(self, lib: Library) -> None:
        self._c = lib.c

    def draw(self, logits_V: Tensor, temperature: float, u: float) -> int | None:
        logits = logits_V.contiguous()
        token: int = self._c.ds_draw(logits.data_ptr(), len(logits), temperature, u)
        return None if token < 0 else token

    def reject(
        self,
        logits_V: Tensor,
        temperature: float,
        token: int,
        q: tuple[Tensor, Tensor | None],
        u: tuple[float, float],
    ) -> tuple[bool, int] | None:
        assert q[1] is not None or len(q[0]) == len(logits_V)
        logits, probs, ids = logits_V.contiguous(), q[0].float().contiguous(), q[1]
        ids = None if ids is None else ids.contiguous()
        found: int = self._c.ds_reject(
            *(logits.data_ptr(), len(logits), temperature, token),
            *(probs.data_ptr(), None if ids is None else ids.data_ptr(), len(probs)),
            (ctypes.c_double * 2)(*u),
        )
        if found == -2:
            return None
        return (True, token) if found == -1 else (False, found)

    def judge_chain(
        self,
        logits: Sequence[Tensor],
        temperature: float,
        tokens: Sequence[int],
        q: Sequence[tuple[Tensor, Tensor | None]],
        u: Sequence[float],
        next_u: Sequence[float],
    ) -> tuple[int, int] | None:
        length, vocab = len(tokens), len(logits[0])
        rows = [one.contiguous() for one in logits]
        probs = [one.float().contiguous() for one, _ in q]
        ids = [None if some is None else some.contiguous() for _, some in q]
        assert len(rows) == length + 1
        assert all(
            some is not None or len(one) == vocab for one, some in zip(probs, ids, strict=True)
        )
        drawn = ctypes.c_int64()
        found: int = self._c.ds_judge_chain(
            *(_addresses(rows), vocab, temperature),
            *(length, (ctypes.c_int64 * length)(*tokens)),
            *(_addresses(probs), _addresses(ids), (ctypes.c_int * length)(*map(len, probs))),
            (ctypes.c_double * length)(*u),
            (ctypes.c_double * (length + 1))(*next_u),
            ctypes.byref(drawn),
        )
        return None if found < 0 else (found, drawn.value)


def _addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    pointers = [None if one is None else one.data_ptr() for one in tensors]
    return (ctypes.c_void_p * len(pointers))(*pointers)


_MOST_PIECES, _MOST_NUMBERS = 8, 1 << 22
"""The pieces that an `OutputMemory` knows, and the numbers of the largest (16 MiB)."""


class OutputMemory:
    """Memory for what calls return, used again once nobody holds what lies in it.

    The heap gives such memory back to the system at one step and takes it anew at the next, as soon
    as anything that stays lies behind it; each of its pages then costs a page fault at every step.
    Several threads may take some. Where more outputs are held than it knows pieces, it is memory
    like any other.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []
        """The memory, and what lies in it: the reference is dead once nobody holds that."""

    def take(self, *shape: int) -> Tensor:
        """A tensor in float32 of any content."""
        count, memory = math.prod(shape), None
        if count > _MOST_NUMBERS:
            return torch.empty(shape)
        for _ in range(len(self._pieces)):
            try:
                piece, user = self._pieces.pop(0)
            except IndexError:  # another thread has it
                break
            if user() is not None:
                self._pieces.append((piece, user))
            elif len(piece) >= count:
                memory = piece
                break
        if memory is None:
            memory = torch.empty(count).numpy()  # it begins with a line of the caches
        whole = memory[:count]
        self._pieces.append((memory, weakref.ref(whole)))
        del self._pieces[:-_MOST_PIECES]  # theirs who hold them
        return torch.from_numpy(whole).view(shape)


class Matrices:
    """Matrices in the extension's memory.

    Raises:
        NotBuilt: the extension cannot be built here.
    """

    def __init__(self, form: str, *, stored: Stored | None = None, named: Any = None) -> None:
        """`named`: whose layers `stored` has."""
        self._lib = usable_library()
        self.form = form
        self.instructions = self._lib.instructions
        self.draws = LogitDraws(self._lib)
        self._stored = stored or (lambda name: None)
        layers = () if named is None else named.named_modules()
        self._names = {module: name for name, module in layers}
        self._held: list[Memory] = []
        self._matrices: list[PackedMatrix] = []
        self._kept: Iterator[PackedMatrix] | None = None

    @property
    def quantised(self) -> bool:
        """Some of its matrices are in 4 or 8 bits."""
        return any(matrix.format in ("int8", "int4") for matrix in self._matrices)

    @property
    def bytes(self) -> int:
        """Size of the matrices."""
        return sum(matrix.bytes for matrix in self._matrices)

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        self._held.append(Memory(self._lib, values.float()))
        return self._held[-1].at

    def _packed(
        self, linears: Sequence[Any], *, by_turns: bool = False, in_blocks: bool = False
    ) -> Any:
        """Layers with one input as one matrix: rows below each other, or panels of two by turns."""
        if self._kept is not None:
            self._matrices.append(next(self._kept))
            return self._matrices[-1].c
        blocks = [self._usable(self._stored(self._names.get(linear, ""))) for linear in linears]
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


class Runner(Matrices):
    """Forwards through layers; subclasses bring the model."""

    spec: KVSpec
    """What a cache for it stores."""
    model: Model

    def __init__(
        self, form: str, rotary: Any, *, stored: Stored | None = None, named: Any = None
    ) -> None:
        """`rotary`: the module that gives cosines and sines."""
        super().__init__(form, stored=stored, named=named)
        self._rotary = rotary
        self._turns = torch.zeros(0, 0), torch.zeros(0, 0)
        self._memory = OutputMemory()

    def _open(self, model: Model) -> None:
        """The last step of making it: all weights are in `model`."""
        self.model = model
        self._head_rows = -(-model.head.rows // LANES) * LANES
        self._at = self._lib.c.ds_open(ctypes.byref(model))
        weakref.finalize(self, self._lib.c.ds_close, self._at)
        kv_heads, width = model.kv_heads, model.width
        self.spec = KVSpec(
            layers=((kv_heads, width, width),) * model.layers,
            dtype=torch.float32 if self.form == "float32" else torch.bfloat16,
            device=torch.device("cpu"),
        )
        del self._names, self._stored, self._kept

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            norm_in=self._vector(_weight(layer, "input_layernorm")),
            norm_mlp=self._vector(layer.post_attention_layernorm.weight),
            norm_q=self._vector(_weight(attention, "q_norm")),
            norm_k=self._vector(_weight(attention, "k_norm")),
            qkv=self._packed([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=self._packed([attention.o_proj]),
            gate_up=self._packed([mlp.gate_proj, mlp.up_proj], by_turns=True),
            down=self._packed([mlp.down_proj]),
        )

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        tokens_BT: Tensor | np.ndarray,
        block: Block,
        keep: int,
        signals: Signals,
        feature_BTS: Tensor | None = None,
    ) -> TargetOutput:
        """As `Target.forward`; logits and signals in float32. `feature_BTS`: the states that a
        drafter reads beside the tokens, the target's or its own."""
        call, held = self._call(tokens_BT, block, keep, feature_BTS)
        layers = np.array(signals.layers, dtype=np.int32)
        kinds = len(layers) + signals.last_hidden
        logits_BNV = self._memory.take(call.rows, call.keep, self._head_rows)
        signals_BTS = torch.empty((call.rows, call.width, kinds * self.model.hidden))
        if not np.asarray(block.see_BTC).any(-1).all():  # nothing is written for padding
            logits_BNV.zero_()
            signals_BTS.zero_()
        call.num_signals, call.last_hidden = len(layers), int(signals.last_hidden)
        call.signal_at, call.signal = _address(layers), signals_BTS.data_ptr()
        call.logits = logits_BNV.data_ptr()
        if not self._lib.c.ds_forward(self._at, ctypes.byref(call)):
            raise self._unknown(tokens_BT)
        del held  # until here the call reads them
        return TargetOutput(
            logits_BNV=logits_BNV[..., : self.model.head.rows],
            signals_BTS=signals_BTS if kinds else None,
        )

    def chain(
        self,
        cache: KVCache,
        tokens_BP: np.ndarray,
        counts_B: np.ndarray,
        depth_B: np.ndarray,
        *,
        most: int,
        limit: int | None = None,
        feature_BPS: Tensor | None = None,
        token_of_D: Tensor | None = None,
        draws: Draws | None = None,
        confidence: float = 0.0,
    ) -> tuple[Tensor, Tensor | None, np.ndarray]:
        """Feed and commit these tokens, and draft a chain behind the last of each row.

        Args:
            tokens_BP, counts_B: see `right_aligned`; they go on with what the cache holds.
            depth_B: how many tokens each row wants, at most.
            most: rows of the head that count.
            limit: the length of the context; positions beyond it stand still at its end.
            feature_BPS: see `forward`; later tokens are read with the network's own states.
            token_of_D: the token that each row of the head stands for; None: its number.
            draws: how tokens are drawn; None: the most probable ones.
            confidence: a row's chain ends behind the token that makes it less probable than this.

        Returns:
            ([B, S] tokens, the laws [B, S, most] that they were drawn from (None: they were not),
            [B] tokens of each chain), S the longest of them; zeros for a row that is fed
            nothing. Of logits that are NaN a law is NaN.
        """
        rows, steps = len(tokens_BP), int(depth_B.max())
        call, held = self._run(cache, tokens_BP, counts_B, feature_BPS, limit, room=steps - 1)
        chosen_BN = torch.zeros((rows, steps), dtype=torch.int64)
        count_B = np.array(depth_B, dtype=np.int64)  # a copy, which the extension writes
        chain, also_held = self._chain(chosen_BN, count_B, token_of_D, draws, confidence)
        chain.vocab, laws_NBV = most, None
        if draws is not None:
            laws_NBV = self._memory.take(steps, rows, self._head_rows)
            if not all(counts_B.tolist()):
                laws_NBV.zero_()
            chain.scores = laws_NBV.data_ptr()
        if not self._lib.c.ds_chain(self._at, ctypes.byref(call), ctypes.byref(chain)):
            raise self._unknown(tokens_BP)
        cache.commit(counts_B)
        del held, also_held
        made = max(*count_B.tolist(), 1)
        if laws_NBV is None:
            return chosen_BN[:, :made], None, count_B
        return chosen_BN[:, :made], laws_NBV[:made, :, :most].transpose(0, 1), count_B

    def _call(
        self, tokens_BT: Tensor | np.ndarray, block: Block, keep: int, feature_BTS: Tensor | None
    ) -> tuple[Call, list[Any]]:
        """The call of a forward, outputs aside, and the arrays that it points to."""
        position, column = _numbers(block.positions_BT), _numbers(block.columns_BC)
        see = np.ascontiguousarray(block.see_BTC)
        even = isinstance(block.slots_BT, int)
        slot = None if even else _numbers(block.slots_BT)
        call, held = self._begun(
            *(tokens_BT, block.cache, block.lengths_B, feature_BTS),
            positions=int(position.max(initial=0)) + 1,
        )
        call.staged, call.keep = see.shape[2], min(keep, see.shape[1])
        call.position, call.see, call.column = _address(position), _address(see), _address(column)
        if slot is None:
            call.first_slot = block.slots_BT
        else:
            call.slot = _address(slot)
        return call, [*held, position, see, column, slot]

    def _run(
        self,
        cache: KVCache,
        tokens_BP: np.ndarray,
        counts_B: np.ndarray,
        feature_BPS: Tensor | None,
        limit: int | None,
        *,
        keep: int = 1,
        room: int = 0,
    ) -> tuple[Call, list[Any]]:
        """The call of tokens that go on with the texts in a cache, see `chain`, and the arrays that
        it points to. Nothing is staged: what they see is what stands before them. `room`: tokens
        that will be fed behind them."""
        width = tokens_BP.shape[1]
        longest = max(cache.lengths_B.tolist(), default=0) + width + room
        cache.reserve(longest)
        positions = longest if limit is None else min(longest, limit)
        call, held = self._begun(
            tokens_BP, cache, cache.lengths_B, feature_BPS, positions=positions
        )
        counts_B = _numbers(counts_B)
        call.staged, call.keep = width, keep
        call.count, call.last = _address(counts_B), positions - 1
        return call, [*held, counts_B]

    def _begun(
        self,
        tokens_BT: Tensor | np.ndarray,
        cache: KVCache,
        lengths_B: np.ndarray,
        feature_BTS: Tensor | None,
        *,
        positions: int,
    ) -> tuple[Call, list[Any]]:
        """What any call says, and the arrays that it points to. `positions`: no token stands at
        this one, or behind it."""
        token, committed = _numbers(tokens_BT), _numbers(lengths_B)
        cosine, sine = self._rotation(positions)
        store = cache.whole()
        strides = store.stride()
        feature = None if feature_BTS is None else feature_BTS.float().contiguous()
        call = Call(
            threads=engine_threads(),
            rows=token.shape[0],
            width=token.shape[1],
            cache_bf16=int(store.dtype == torch.bfloat16),
            feature_width=0 if feature is None else feature.shape[-1],
            feature=None if feature is None else feature.data_ptr(),
            token=_address(token),
            committed=_address(committed),
            cache=store.data_ptr(),
            layer_stride=strides[0],
            row_stride=strides[1],
            head_stride=strides[2],
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
        )
        return call, [token, committed, cosine, sine, store, feature]

    def _chain(
        self,
        chosen_BN: Tensor,
        count_B: np.ndarray,
        token_of_D: Tensor | None,
        draws: Draws | None,
        confidence: float,
    ) -> tuple[Chain, list[Any]]:
        """How tokens are chosen behind those of a call, all rows of the head counting, and the
        arrays that this points to."""
        uniform = None
        if draws is not None:
            uniform = np.ascontiguousarray(draws.uniform_BN, dtype=np.float64)
        chain = Chain(
            steps=chosen_BN.shape[1],
            vocab=self.model.head.rows,
            token_of=None if token_of_D is None else token_of_D.data_ptr(),
            uniform=None if uniform is None else _address(uniform),
            temperature=1.0 if draws is None else draws.temperature,
            confidence=confidence,
            count=_address(count_B),
            chosen=chosen_BN.data_ptr(),
        )
        return chain, [uniform]

    def _unknown(self, tokens_BT: Tensor | np.ndarray) -> InputError:
        tokens = np.asarray(tokens_BT)
        return InputError(
            f"Token ids reach from {tokens.min()} to {tokens.max()}, and this model knows 0 to "
            f"{self.model.embedding.rows - 1}: use the tokenizer and the drafter that belong to it."
        )

    def _rotation(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, width / 2], as the model's own module computes them."""
        if len(self._turns[0]) < positions:
            count = max(256, 1 << (positions - 1).bit_length())
            probe = torch.zeros(1, 1, dtype=torch.float32)
            with torch.inference_mode():
                cosine, sine = self._rotary(probe, torch.arange(count)[None])
            half = cosine.shape[-1] // 2
            self._turns = cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous()
        return self._turns


class Engine(Runner):
    """Runs forwards of `model`, whose weights are copied into the extension's memory.

    Args:
        model: a transformers model for which `why_not` is None.
        form: one of `FORMATS`.
        stored: blocks that a file holds, for `int4` and `int8`: taken as they are.
        sources: the files that the weights are from, if nothing has changed them since: packed ones
            are kept beside the user's other caches, and found there (`packed.py`).
    """

    def __init__(
        self,
        model: Any,
        form: str,
        *,
        stored: Stored | None = None,
        sources: Versions = (),
    ) -> None:
        config, decoder = model.config, model.model
        super().__init__(form, decoder.rotary_emb, stored=stored, named=model)
        file, kept = None, None
        if sources:
            file = PackedFile.of(sources, form, str(model.dtype), self._lib)
            kept = file.load(self._lib)
            self._kept = None if kept is None else iter(kept)
        attention = decoder.layers[0].self_attn
        self._layers = (Layer * len(decoder.layers))(*map(self._layer, decoder.layers))
        head = self._packed([model.get_output_embeddings()], in_blocks=True)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        embedding = head if tied else self._packed([model.get_input_embeddings()], in_blocks=True)
        self._open(
            Model(
                layers=len(self._layers),
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                width=attention.head_dim,
                mlp=config.intermediate_size,
                halves=1,
                eps=config.rms_norm_eps,
                scale=attention.scaling,
                layer=self._layers,
                norm_out=self._vector(decoder.norm.weight),
                embedding=embedding,
                head=head,
            )
        )
        if file is not None and kept is None:
            file.store(self._matrices)


def _numbers(values: Any) -> np.ndarray:
    """As the extension reads them."""
    return np.ascontiguousarray(values, dtype=np.int64)


def _address(values: np.ndarray) -> int:
    """Where they lie, in half the time that `values.ctypes` takes."""
    return torch.from_numpy(values).data_ptr()


def _weight(module: Any, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight
