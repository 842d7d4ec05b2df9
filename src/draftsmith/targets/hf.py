"""Transformers models as targets and draft models, loaded by name, over our cache and masks."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, cached_file

from draftsmith.config import is_whole, require_kind, require_name, require_short, short
from draftsmith.core import attention
from draftsmith.core.cache import Block, KVCache, KVSpec
from draftsmith.core.transfer import to_device
from draftsmith.core.types import Signals, TargetOutput
from draftsmith.errors import (
    BackendError,
    DraftsmithError,
    InputError,
    UnsupportedModel,
    nearest,
)
from draftsmith.plugins import TARGETS, load_plugin, plugin_names, wrong_plugin
from draftsmith.provenance import read_json
from draftsmith.targets.base import BindableTarget
from draftsmith.targets.config import ModelConfig, check_fixed_width, check_weights
from draftsmith.targets.fixed import KEYS, FixedWidth, gives_equal_bits, has_experts
from draftsmith.targets.gguf import StoredBlocks, checkpoint, gguf_file, unpacked
from draftsmith.targets.graphs import CudaCapture, Graphs
from draftsmith.targets.native.bindings import NotBuilt
from draftsmith.targets.native.engine import FORMATS, Engine, Stored, too_large, why_not
from draftsmith.targets.native.packed import Versions, versions_of
from draftsmith.targets.support import (
    LISTED,
    MOST_LISTED,
    around_attention,
    context_of,
    harmless_ids,
    probe,
    refuse_by_class,
    refuse_by_config,
    refuse_by_counts,
    refuse_by_files,
    refuse_by_report,
    refuse_by_tokenizer,
    self_check,
    stored_tensors,
)
from draftsmith.targets.threads import beside_engine, take_kept_threads

_log = logging.getLogger(__name__)


def causal_head(
    model: PreTrainedModel, ids_D: Tensor | None = None, dtype: torch.dtype | None = None
) -> Callable[[Tensor], Tensor]:
    """Hidden [.., H] -> logits [.., V], with the scale or soft-cap of the model's own forward; of
    the tokens `ids_D` alone where they are given, by a copy of their rows in `dtype`."""
    head = model.get_output_embeddings()
    if ids_D is not None:
        bias = None if getattr(head, "bias", None) is None else head.bias[ids_D].to(dtype)
        head = partial(F.linear, weight=head.weight[ids_D].to(dtype), bias=bias)
    config = model.config.get_text_config(decoder=True).to_dict()
    multiply = config.get("logit_scale") or 1.0  # Cohere
    divide = config.get("logits_scaling") or 1.0  # Granite
    cap = config.get("final_logit_softcapping")  # Gemma 2

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = head(hidden)
        if multiply != 1.0 or divide != 1.0:
            out = out * (multiply / divide)
        return cap * torch.tanh(out / cap) if cap else out

    return logits


@dataclass(frozen=True, slots=True)
class CapturedOutputs:
    """Outputs of the last forward, module by module."""

    states: list[Tensor | None]

    @property
    def signals_BTS(self) -> Tensor | None:
        """Side by side, in the order of the modules; None: no module was captured."""
        if not self.states:
            return None
        given = [state for state in self.states if state is not None]
        assert len(given) == len(self.states), "a captured module did not run"
        return torch.cat(given, -1)


@contextmanager
def capture_outputs(modules: Sequence[Any]) -> Iterator[CapturedOutputs]:
    """Keep what these modules give in every forward inside the `with`."""
    captured = CapturedOutputs([None] * len(modules))

    def keep(number: int, module: Any, inputs: Any, output: Any) -> None:
        captured.states[number] = output if isinstance(output, Tensor) else output[0]

    with ExitStack() as stack:
        for number, module in enumerate(modules):
            stack.callback(module.register_forward_hook(partial(keep, number)).remove)
        yield captured


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


_FORMS = {"bf16": "bfloat16"}
"""Formats of weights that the command line abbreviates."""

LIMIT_BYTES = 2 << 30
"""Models whose weights come to more are not packed: the copy would be felt."""
_LEAST_TRIED = 16
"""Tokens that a fixed width is tried with, if it has not more itself. Of eight a kernel may give
equal bits by chance."""
_STEP = 4
"""Tokens per forward that the layout is chosen for."""


def packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return a packed forward for one linear layer."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _STEP)
    bias = None if layer.bias is None else layer.bias.detach()
    return lambda input: torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


class PackedLinears:
    """The packed twins of a model's bfloat16 linear layers on a CPU, switched on and off together.

    oneDNN multiplies a bfloat16 weight in its own blocked layout about twice as fast as in the
    plain one, for the one to nine tokens of a decoding step; the sums are the same, bit for bit.
    The plain weight stays (it may be tied, and transformers' own code reads it), so packing costs
    its size again. Twin: `torch.nn.functional.linear`.

    Empty where packing does not apply: another device or dtype, a processor without bfloat16
    arithmetic, or more than `LIMIT_BYTES` of weights.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else model.modules()
        layers = [m for m in modules if type(m) is nn.Linear and _fits(m)]
        size = sum(m.weight.numel() * m.weight.element_size() for m in layers)
        usable = torch.backends.mkldnn.is_available() and (
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        with torch.no_grad():
            packs = layers if usable and size <= LIMIT_BYTES else []
            self._pairs = [(layer, packed_forward(layer)) for layer in packs]

    def use(self, on: bool) -> None:
        """Route the layers through their packed twins, or back through the plain weights."""
        for layer, packed in self._pairs:
            if on:
                layer.__dict__["forward"] = packed
            else:
                layer.__dict__.pop("forward", None)

    def __len__(self) -> int:
        return len(self._pairs)


def _fits(layer: nn.Linear) -> bool:
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.bfloat16


class HFTarget:
    """A transformers causal language model behind the `Target` protocol.

    Args:
        model: in evaluation mode after this call; its attention implementation becomes ours.
        tokenizer: or None, when only token ids are used.
        end_ids: tokens that end generation; None: those of the generation config and tokenizer.
        attn_implementation: `sdpa` (fused) or `eager` (written out).
        name: what messages and reports call it; None: the model's class.
        check: compare a few tokens with the model's own eager attention (three small forwards).
        weights: the format they are computed in, see `ModelConfig`.
        compile: run forwards in the compiled engine where it can: it copies the weights here and
            now, so leave it out for a model that goes on learning.
        stored: blocks of a GGUF file, which the engine takes as they are.
        sources: the files that the weights are from and still are: the engine keeps its own form of
            them for the next load.
        fixed_width: see `ModelConfig`.

    Raises:
        UnsupportedModel: its state cannot roll back, or its attention cannot take a tree; or it
            cannot keep a fixed width.
        BackendError: the tokenizer has tokens that the model does not, or its weights are broken.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        end_ids: frozenset[int] | None = None,
        attn_implementation: str = "sdpa",
        name: str | None = None,
        check: bool = True,
        weights: str = "auto",
        compile: bool = False,
        stored: Stored | None = None,
        sources: Versions = (),
        fixed_width: int | None = None,
    ) -> None:
        if attn_implementation not in ("sdpa", "eager"):
            raise InputError(
                f"attn_implementation must be sdpa or eager, got {attn_implementation!r}."
            )
        check_fixed_width(fixed_width, attn_implementation)
        self.model, self.tokenizer = model, tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self.name = name or type(model).__name__
        title = _title(name, type(model).__name__)
        refuse_by_config(model.config, title)
        refuse_by_class(model, title)
        self.attn_implementation = attn_implementation
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.vocab_size: int = _head(model, title).weight.shape[0]
        refuse_by_tokenizer(model, tokenizer, title)
        self.max_length = context_of(self.config, title)
        self.end_ids = end_ids_of(model, tokenizer) if end_ids is None else end_ids
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        # Gemma 4 drops tokens whose logits are not asked for from the layers that share keys.
        self._drops = bool(getattr(self.config, "num_kv_shared_layers", 0))
        model.eval().requires_grad_(False)
        if self.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped kernel has no float64
        found = probe(model, self.config, title, self.device)
        self._ambient = found.ambient
        self._eager_only = found.eager_only
        layers = found.layers.values()
        self._windows = tuple(layer.window for layer in layers)
        self._decoder_layers = around_attention(model, [layer.module for layer in layers])
        self._spec = KVSpec(
            layers=tuple(layer.stores for layer in layers),
            dtype=self.dtype,
            device=self.device,
        )
        attention.register()
        self.not_compiled: str | None = None
        """Why transformers' own code runs the forwards; None: the compiled engine does."""
        self._engine = self._compiled(weights, compile, stored, sources, title)
        if self._engine is not None:
            self._spec = self._engine.spec
        self.fixed_width = None if self._engine is not None else fixed_width
        """Tokens of every forward, where that is what makes logits equal; None: it is not."""
        self._fixed: FixedWidth | None = None
        if self.fixed_width is not None:
            if has_experts(self.config):
                raise UnsupportedModel(
                    f"{title} cannot keep --fixed-width: its experts multiply as many tokens at "
                    "once as chose them, so leave it out."
                )
            if self._eager_only:
                raise UnsupportedModel(
                    f"{title} cannot keep --fixed-width: its attention is written out (soft-caps "
                    "or sinks), and sums in another order over a longer cache. Leave it out."
                )
            self._spec = replace(self._spec, bucket=KEYS)
            self._fixed = FixedWidth(self._forward, self.fixed_width, whole=self._drops)
        # a graph is captured after some forwards, and nobody promises that it has their kernels
        self._graphs = self._as_graphs() if compile and self._fixed is None else None
        self._packed = PackedLinears(None if self._engine else model)
        self._logits = causal_head(model)
        self._use_attention(attention.NAME)
        if check:
            self_check(self, title)
        if self.fixed_width is not None:
            self._check_fixed_width(title)

    def _compiled(
        self,
        weights: str,
        compile: bool,
        stored: Stored | None,
        sources: Versions,
        title: str,
    ) -> Engine | None:
        """The engine, or None where transformers' own code does as it is asked."""
        asked = weights != "auto"
        form = str(self.dtype).removeprefix("torch.") if not asked else _FORMS.get(weights, weights)
        if not asked and stored is not None:
            form = "stored"
        if not compile:
            self.not_compiled = "it was not asked for"
        elif self.attn_implementation == "eager":
            self.not_compiled = "eager attention was asked for"
        elif form not in FORMATS:
            self.not_compiled = f"it computes in {form}"
        else:
            self.not_compiled = why_not(self.model, self._windows, form)
        slower = stored is not None  # and another model: its weights are not rounded as the file's
        if self.not_compiled is None:
            self.not_compiled = too_large(self.model, form)
            slower = slower or self.not_compiled is not None
        if self.not_compiled is None:
            try:
                return Engine(self.model, form, stored=stored, sources=sources)
            except NotBuilt as error:
                self.not_compiled, slower = str(error), True
        if asked and form != str(self.dtype).removeprefix("torch."):
            raise UnsupportedModel(
                f"{title} cannot be run with --weights {weights}: {self.not_compiled}"
            )
        if compile and slower:
            _log.warning("%s is not compiled, transformers runs it: %s", title, self.not_compiled)
        return None

    def _check_fixed_width(self, title: str) -> None:
        assert self.fixed_width is not None
        count = max(self.fixed_width, _LEAST_TRIED)
        count = count if self.max_length is None else min(count, self.max_length)
        ids = harmless_ids(self.config.to_dict(), count)
        if not gives_equal_bits(self, ids, self.fixed_width):
            raise UnsupportedModel(
                f"{title} cannot keep --fixed-width {self.fixed_width} here: a token gets other "
                f"logits at another place of a forward, or before a longer cache, in "
                f"{str(self.dtype).removeprefix('torch.')} on {self.device.type} with "
                f"{self.attn_implementation} attention. Leave it out, or try another width."
            )

    def _as_graphs(self) -> Graphs | None:
        """On a GPU, unless the model takes its block from around the forward."""
        if self.device.type != "cuda" or self._ambient or self.attn_implementation == "eager":
            return None
        return Graphs(self._forward, self._windows, self.dtype, CudaCapture())

    @property
    def quantised(self) -> bool:
        """Its forwards use weights of 4 or 8 bits."""
        return self._engine is not None and self._engine.quantised

    def unquantised(self) -> HFTarget:
        """The same model in its weights' own number format, run by transformers' code."""
        return HFTarget(
            self.model,
            self.tokenizer,
            end_ids=self.end_ids,
            attn_implementation=self.attn_implementation,
            name=self.name,
            check=False,
        )

    @property
    def exact(self) -> bool:
        """Logits of a token are equal bit for bit, whatever else is in the forward."""
        return self._engine is not None or self._fixed is not None

    @property
    def compiled(self) -> Engine | None:
        """The compiled engine, where it runs the forwards."""
        return self._engine

    @property
    def engine(self) -> str:
        """What runs its forwards: `transformers`, or the compiled engine with which weights."""
        if self._fixed is not None:
            return f"transformers, fixed width {self._fixed.width}"
        if self._engine is None:
            graphs = self._graphs is not None and self._graphs.why_not is None
            return "transformers, CUDA graphs" if graphs else "transformers"
        return f"compiled ({self._engine.instructions}, {self._engine.form} weights)"

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        return KVCache(self._spec, num_rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def head(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def head_over(self, ids_D: Tensor) -> Callable[[Tensor], Tensor]:
        return causal_head(self.model, ids_D)

    def head_weight(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @torch.inference_mode()
    def forward(self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals) -> TargetOutput:
        if self._engine is not None:
            with beside_engine(True):
                return self._engine.forward(tokens_BT, block, keep, signals)
        tokens_BT = to_device(tokens_BT, self.device)
        if self._fixed is not None:
            return self._fixed.forward(tokens_BT, block, keep, signals)
        if self._graphs is not None:
            return self._graphs.forward(tokens_BT, block, keep, signals)
        return self._forward(tokens_BT, block, keep, signals)

    def _forward(
        self, tokens_BT: Tensor, block: Block, keep: int, signals: Signals
    ) -> TargetOutput:
        """By transformers' own code."""
        block.eager = self.attn_implementation == "eager"
        trims = self._keeps and not (self._drops and signals != Signals())
        options: dict[str, Any] = {"logits_to_keep": keep} if trims else {}
        with ExitStack() as stack:
            if self._ambient:
                stack.enter_context(attention.ambient(block, self._windows))
            captured = stack.enter_context(self.capture(signals))
            out = self.model(
                input_ids=tokens_BT,
                position_ids=block.positions(self.device),
                use_cache=False,
                draftsmith_block=block,
                draftsmith_windows=self._windows,
                **options,
            )
        return TargetOutput(logits_BNV=out.logits[:, -keep:], signals_BTS=captured.signals_BTS)

    def capture(self, signals: Signals) -> AbstractContextManager[CapturedOutputs]:
        """Inside a `with`: `signals` of every forward of the model, also of `native`, in the order
        that `forward` gives them.

        Raises:
            InputError: it has no such layer.
        """
        return capture_outputs(self._signal_modules(signals))

    def _signal_modules(self, signals: Signals) -> list[Any]:
        """The modules whose outputs are asked for: decoder layers, then the whole decoder (its
        output is the state after the final norm)."""
        wrong = [layer for layer in signals.layers if not 0 <= layer < len(self._decoder_layers)]
        if wrong:
            raise InputError(
                f"{self.name} has {len(self._decoder_layers)} decoder layers, so its layer "
                f"{wrong[0]} cannot be read (they count from 0)."
            )
        modules = [self._decoder_layers[layer] for layer in signals.layers]
        return [*modules, self.model.get_decoder()] if signals.last_hidden else modules

    @contextmanager
    def native(self, attn_implementation: str | None = None) -> Iterator[Any]:
        """The bare model with transformers' own attention, inside a `with`: for `generate`.

        None: sdpa, or eager for a model that sdpa would decode wrongly (soft-caps, sinks).
        """
        usual = "eager" if self._eager_only else self.model.get_correct_attn_implementation(None)
        self._use_attention(attn_implementation or usual)
        try:
            yield self.model
        finally:
            self._use_attention(attention.NAME)

    def _use_attention(self, name: str) -> None:
        self.model.config._attn_implementation = name
        self.config._attn_implementation = name
        self._packed.use(name == attention.NAME)


class EmbeddingAndHead:
    """What a drafter over hidden states borrows, without the target's layers (a `TargetView`).

        tokens -> [embedding] -> (layers, not loaded) -> states after the final norm -> [head]

    Training from stored hidden states needs no more of an 8 B model than these two matrices.

    States and embeddings go in and out in float32, whatever the target's own numbers are: what
    learns keeps float32 weights. Both matrices move to where they are asked for.
    """

    def __init__(self, model: Any, config: Any, tokenizer: Any) -> None:
        """`model`: its layers are not used. `config`: of the target's text decoder, whole."""
        self._model = model.eval().requires_grad_(False)
        title = type(model).__name__
        refuse_by_tokenizer(model, tokenizer, title)
        self._logits = causal_head(model)
        self.config, self.tokenizer = config, tokenizer
        self.end_ids = end_ids_of(model, tokenizer)
        self.vocab_size: int = self.head_weight().shape[0]
        self.max_length = context_of(config, title)
        self.dtype = torch.float32

    @classmethod
    def load(cls, name: str, config: Any, tokenizer: Any) -> EmbeddingAndHead:
        """Read both from a model folder or hub id, without the layers.

        Raises:
            BackendError: the folder is missing, unreadable or incomplete.
        """
        return cls(load_model(name, layers=False), config, tokenizer)

    @property
    def device(self) -> torch.device:
        return self._model.get_output_embeddings().weight.device

    def embed(self, tokens: Tensor) -> Tensor:
        self._follow(tokens)
        embedded: Tensor = self._model.get_input_embeddings()(tokens)
        return embedded.to(self.dtype)

    def head(self, hidden: Tensor) -> Tensor:
        self._follow(hidden)
        return self._logits(hidden.to(self.head_weight().dtype)).to(self.dtype)

    def head_over(self, ids_D: Tensor) -> Callable[[Tensor], Tensor]:
        self._follow(ids_D)
        # in the precision of the training: products of bfloat16 are slow on many processors
        return causal_head(self._model, ids_D, self.dtype)

    def head_weight(self) -> Tensor:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def _follow(self, values: Tensor) -> None:
        if values.device != self.device:
            self._model.to(values.device)


def _title(name: str | None, architecture: str) -> str:
    """How an error names a model: `Qwen3-0.6B (Qwen3ForCausalLM)`."""
    return architecture if name is None or name == architecture else f"{name} ({architecture})"


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str = "sdpa",
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
    with_tokenizer: bool = True,
    weights: str = "auto",
    compile: bool = True,
    fixed_width: int | None = None,
) -> HFTarget:
    """Load a model folder or hub id with its tokenizer (or for token ids only).

    Raises:
        InputError: unknown dtype, device or format of weights, or a width that is none.
        BackendError: the folder is missing or unreadable, or holds parts of two models.
        UnsupportedModel: the architecture cannot be decoded exactly.
    """
    require_name("a target", name)
    require_short("a target", name)
    require_kind("dtype", dtype, str, ", such as 'float32'")
    require_kind("device", device, str, ", such as 'cuda:0'")
    require_kind("attn_implementation", attn_implementation, str, ", such as 'sdpa'")
    if revision is not None:
        require_kind("revision", revision, str, ", such as a branch or tag")
    require_kind("trust_remote_code", trust_remote_code, bool)
    require_kind("compile", compile, bool)
    check_weights(weights)
    check_fixed_width(fixed_width, attn_implementation)  # before anything is loaded
    name = os.fspath(name)
    title, stored = Path(name).name or name, None
    file = gguf_file(name)
    if revision is not None and (file is not None or Path(name).expanduser().exists()):
        raise InputError(
            f"A revision ({revision!r}) is one of a hub model, and {name!r} is a local one: leave "
            "it out."
        )
    if file is not None:
        name, title = os.fspath(unpacked(file)), file.stem
    sources = versions_of(_weight_files(Path(name).expanduser(), file))
    model = load_model(
        name, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
    )
    tokenizer = None
    if with_tokenizer:
        tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
    if file is not None and dtype in ("auto", "bfloat16"):
        stored = StoredBlocks(file, Path(name), model.config)
    return HFTarget(
        model,
        tokenizer,
        attn_implementation=attn_implementation,
        name=title,
        check=check,
        weights=weights,
        compile=compile,
        stored=stored,
        sources=sources,
        fixed_width=fixed_width,
    )


def _weight_files(folder: Path, gguf: Path | None) -> list[Path]:
    """The files of a local model's weights; of a hub model none, which the hub may replace."""
    found = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    return found if gguf is None else [gguf, *found]


def open_target(model: ModelConfig, *, quiet: bool = False) -> BindableTarget:
    """Load a target: a folder or hub id (see `load_target`), or `KIND:SOURCE` of an installed kind.

    `quiet`: without the progress bars and remarks of transformers.

    Raises:
        InputError: an option that only transformers models have, for another kind of target.
        BackendError: the model, or the package that offers the kind, cannot be loaded.
        UnsupportedModel: the architecture cannot be decoded exactly.
    """
    if quiet:
        quieten()
    name = model.target
    kind, colon, source = name.partition(":")
    if not colon or kind not in plugin_names(TARGETS):
        options = vars(model).copy()
        loaded = load_target(options.pop("target"), **options)
        if loaded.device.type == "cpu":
            take_kept_threads(loaded.name, loaded.model, loaded.engine)
        return loaded
    plain = ModelConfig(target=name, dtype=model.dtype, device=model.device)
    if model != plain:
        raise InputError(
            f"Target {name!r} is no transformers model: leave out attn_implementation, weights, "
            "compile, fixed_width, revision and trust_remote_code."
        )
    load = load_plugin(TARGETS, kind, ())
    if not callable(load):
        raise wrong_plugin(TARGETS, kind, "a function `load(source, *, dtype, device)`")
    target: BindableTarget = load(source, dtype=model.dtype, device=model.device)
    if not all(hasattr(target, part) for part in ("vocab_size", "new_cache", "forward")):
        raise wrong_plugin(TARGETS, kind, "a function that returns a target")
    return target


def open_model(model: ModelConfig) -> HFTarget:
    """As `open_target`, quietly, for callers that read the modules of a transformers model.

    Raises:
        InputError: the target is of another kind.
    """
    target = open_target(model, quiet=True)
    if not isinstance(target, HFTarget):
        raise InputError(f"--target {model.target}: this needs a transformers model.")
    return target


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    layers: bool = True,
) -> Any:
    """A transformers causal language model; safetensors only, and only a complete checkpoint.

    Without `layers` its decoder layers are neither made nor read: embedding, norm and head remain.

    Raises:
        InputError: unknown dtype or device.
        BackendError: the folder is missing, unreadable or incomplete, or its files hold another
            model than its configuration asks for.
        UnsupportedModel: the configuration shows that it cannot be decoded exactly.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    if dtype != "auto" and dtype not in _DTYPES:
        raise InputError(f"Unknown dtype {dtype!r}{nearest(dtype, [*_DTYPES, 'auto'])}.")
    place = pick_device(device)
    name = checkpoint(name)
    _require_folder(name)
    where = revision or "main"
    source: dict[str, Any] = {"revision": where, "trust_remote_code": trust_remote_code}
    with loading(f"the model {name!r}", name):
        plain, _ = PreTrainedConfig.get_config_dict(name, revision=where)
        refuse_by_counts(plain, MOST_LISTED, name, f"no model has more than {MOST_LISTED}", LISTED)
        config = AutoConfig.from_pretrained(name, **source)
        # before gigabytes of weights are read
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        kind = type(config).__name__ if architecture is None else architecture.__name__
        refuse_by_config(config, _title(Path(name).name, kind))
        if architecture is not None:
            refuse_by_class(architecture, _title(Path(name).name, kind))
        if not layers:
            _without_layers(config.get_text_config(decoder=True))
        stored = stored_tensors(name, where, plain)
        experts = [one.shape[0] for one in stored.values() if len(one.shape) == 3]
        refuse_by_counts(
            plain, max(len(stored), *experts, 0), name, f"its files hold {len(stored)} tensors"
        )
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        refuse_by_files(skeleton, plain, stored, name)
        _check_generation_config(name, where)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=_DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in a sentence
            **source,
        )
        refuse_by_report(model, report, name, layers=layers)
        return model.to(place)


def _without_layers(config: Any) -> None:
    config.num_hidden_layers = 0
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = []


def _check_generation_config(name: str, revision: str) -> None:
    """transformers decodes without one that it cannot read; we do not: it says where texts end."""
    file = cached_file(
        name, GENERATION_CONFIG_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    if file is not None:
        with loading(f"{GENERATION_CONFIG_NAME} of the model {name!r}"):
            GenerationConfig.from_pretrained(name, revision=revision)


_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken")


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer that stands beside a model.

    Raises:
        BackendError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    name = checkpoint(name)
    _require_folder(name)
    missing = BackendError(
        f"The model {name!r} has no tokenizer files (tokenizer.json, tokenizer.model or "
        "vocab.json); put those of its base model beside the weights."
    )
    if Path(name).is_dir() and not any(any(Path(name).glob(one)) for one in _TOKENIZER_FILES):
        raise missing
    with loading(f"the tokenizer of {name!r}", name):
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision or "main", trust_remote_code=trust_remote_code
        )
        tokenizer.encode("a")  # some settings of a wrong kind are looked at here only
    # without vocabulary files transformers makes one up that knows its special tokens only
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise missing
    return tokenizer


@contextmanager
def loading(what: str, folder: str = "") -> Iterator[None]:
    """Whatever other packages raise while they read files becomes one sentence. `folder`: of a
    model, whose first file that cannot be read is named."""
    try:
        yield
    except DraftsmithError:
        raise
    except Exception as error:
        reason = _unreadable(Path(folder)) if folder else None
        raise BackendError(f"Cannot load {what}: {reason or _sentence(error)}") from error


_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    SAFE_WEIGHTS_INDEX_NAME,
)
"""Files of a model folder that hold a JSON object each."""


def _unreadable(folder: Path) -> str | None:
    """Name the first file that holds no JSON object; other packages say what is wrong in it, but
    not where."""
    for file in (folder / name for name in _OBJECTS if (folder / name).is_file()):
        try:
            if isinstance(read_json(file), dict):
                continue
        except InputError as error:
            return f"{error}."
        return f"{file} holds no JSON object."
    return None


def _sentence(error: Exception) -> str:
    """The first line of another package's message, with a full stop; what a colon announces too."""
    if isinstance(error, IndexError):
        return "a number in it points behind the end of a list."
    if isinstance(error, KeyError):  # its message is the key alone
        return f"the key {error} is missing or has a value that is not known."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next(iter(lines), type(error).__name__)
    if len(lines) > 1 and text.endswith(":"):
        text = f"{text} {lines[1]}"
    return text.rstrip(" .:;,") + "."


def pick_device(device: str) -> torch.device:
    """`auto` takes CUDA or else the CPU. (MPS has no float64, which laws are drawn in: refused.)

    Raises:
        InputError: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("mps"):
        raise InputError("Device 'mps' has no float64, which laws are drawn in: use --device cpu.")
    try:
        place = torch.device(device)
        torch.ones(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"Device {device!r} cannot be used here: {_sentence(error)}") from error
    if place.type == "cpu" and place.index:
        raise InputError(f"Device {device!r} does not exist: the CPU is one device, cpu.")
    return place


def _require_folder(name: str) -> None:
    """A path that is meant as a folder must be one; anything else may be a hub id."""
    path = Path(name).expanduser()
    beside = len(path.parts) > 1 and path.parent.is_dir()
    looks_local = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    looks_local = looks_local or beside or path.exists()
    if looks_local and not (path / "config.json").is_file():
        if path.exists() and not path.is_dir():
            raise BackendError(f"The model {name!r} is a file and no GGUF; give its folder.")
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise BackendError(f"The model folder {name!r} {what}; give a folder or a hub id.")
    for file in sorted(path.glob("*")) if looks_local else ():
        if file.suffix in (".json", ".jinja") and not file.is_file():
            raise BackendError(  # transformers would go on as if it had never been there
                f"The model folder {name!r} holds {file.name}, which leads to no file (a broken "
                "link, say): fetch it again, or delete it."
            )


def _head(model: Any, title: str) -> Any:
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModel(f"{title} has no output head over a vocabulary of tokens.")
    return head


def end_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end generation, by the model's configurations and its tokenizer.

    Raises:
        BackendError: one of them is no number: texts would never end there.
    """
    ids: set[int] = set()
    text_config = model.config.get_text_config(decoder=True)
    for holder in (model.generation_config, model.config, text_config, tokenizer):
        end = getattr(holder, "eos_token_id", None)
        for one in end if isinstance(end, list) else [] if end is None else [end]:
            if not is_whole(one):
                raise BackendError(
                    f"{type(model).__name__} ends its texts with {short(one)}, which is no token "
                    "id: correct eos_token_id in its generation_config.json or config.json."
                )
            ids.add(one)
    return frozenset(ids)


def quieten() -> None:
    """Turn off transformers' progress bars and remarks: we have our own."""
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()
    their_logging.set_verbosity_error()
