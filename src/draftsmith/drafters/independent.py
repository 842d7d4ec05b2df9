"""`independent`: a smaller language model drafts (SpS: Leviathan et al. 2023, arXiv 2211.17192;
Chen et al. 2023, arXiv 2302.01318).

Chains and trees, sampled with their true q, sampled without replacement, or greedy. The draft model
may share the target's tokenizer (also with a padded vocabulary, or a subset of it), or bring
another one: then its text is re-encoded (`vocabulary.py`) and verified by token match.

After a full acceptance the draft model's cache lacks its own last token; it is simply still pending
and fed at the next step together with the target's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import require
from draftsmith.core.cache import KVCache
from draftsmith.core.config import MOST_NODES
from draftsmith.core.law import Noise
from draftsmith.core.rows import common_prefix
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import (
    DraftPrediction,
    DraftTree,
    NarrowHead,
    RequestBatch,
    TrajectoryBatch,
    TreeShape,
)
from draftsmith.drafters.base import (
    Accepted,
    Drafter,
    DraftState,
    TargetView,
    TextState,
    at_least,
)
from draftsmith.drafters.tree_growth import (
    COLDEST,
    HOTTEST,
    ChildSelection,
    ModelReader,
    Vocabularies,
    drawing,
    grow,
    inside_context,
)
from draftsmith.drafters.vocabulary import (
    ReencodedState,
    VocabularySubset,
    padded,
    reencoded_tree,
    same_tokens,
)
from draftsmith.errors import UnsupportedModel
from draftsmith.targets.base import Target
from draftsmith.targets.config import Weights, check_weights
from draftsmith.targets.hf import causal_head
from draftsmith.targets.native.engine import engine_of


@dataclass
class _State(TextState):
    """The draft model's cache, and the tokens that are known (cached or not yet)."""

    cache: KVCache

    def take(self, rows: Sequence[int]) -> _State:
        self.cache.take(rows)
        return super().take(rows)

    def rewind(self, tokens: Sequence[Sequence[int]]) -> _State:
        self.cache.rewind(
            [
                min(common_prefix(old[: int(have)], new), len(new) - 1)
                for old, new, have in zip(self.known, tokens, self.cache.lengths_B, strict=True)
            ]
        )
        return super().rewind(tokens)


class Independent(Drafter):
    """A language model as drafter."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        source: str = ""
        """Folder or hub id of the draft model."""
        proposal: Literal["sampled", "without_replacement", "greedy"] = "sampled"
        """How children are chosen: i.i.d. draws, draws without replacement, or the top tokens."""
        dtype: str = "auto"
        """auto: the target's."""
        weights: Weights = "auto"
        """Format that the compiled engine computes the draft model in: no output depends on it."""
        revision: str = ""
        """Branch, tag or commit of a hub model; empty: its main branch."""
        length: int = 5
        """Tokens per draft, unless the caller gives a shape of its own."""
        confidence: float = 0.0
        """A chain ends behind the token that makes it less probable than this; 0: never before its
        length. Trees take no notice."""
        draft_temperature: float = 1.0
        """Draws are made at so many times the text's temperature, and verified as such. What learnt
        from a target spreads its law wider: a little below 1 more of its draws are accepted."""

        def __post_init__(self) -> None:
            at_least(1, length=self.length, most=MOST_NODES)
            check_weights(self.weights)
            at_least(0, confidence=self.confidence, most=1)
            at_least(COLDEST, draft_temperature=self.draft_temperature, most=HOTTEST)

    config: Config
    trains = True
    takes_trees = True

    def __init__(self, config: Config, *, model: Target | None = None) -> None:
        """`model`: a ready draft model (tests, training); else bind loads `config.source`."""
        super().__init__(config)
        self.default_shape = TreeShape.chain(self.config.length)
        self._draft = model
        self._vocabularies: Vocabularies | None = None
        self._subset_ids: Vocabularies | None = None
        self._target: TargetView | None = None
        if model is not None:
            self._adopt(model)

    @classmethod
    def learner(cls, model: torch.nn.Module, subset_ids: Vocabularies | None = None) -> Independent:
        """A drafter around weights that are to be trained; it cannot draft before it is saved.
        `subset_ids`: how its tokens and the target's correspond, where it has a subset of them."""
        drafter = cls(cls.Config())
        drafter.model, drafter._subset_ids = model, subset_ids
        return drafter

    def _adopt(self, model: Target) -> None:
        self._draft = model
        if isinstance(getattr(model, "model", None), torch.nn.Module):
            self.model = model.model  # type: ignore[attr-defined]  # trains as our own weights

    @property
    def wants_threads(self) -> bool:
        return engine_of(self._draft) is None

    @property
    def draft_model(self) -> Target | None:
        """The language model itself; None before it is loaded."""
        return self._draft

    @property
    def bound_to(self) -> TargetView | None:
        return self._target

    @property
    def reads_text(self) -> bool:
        """Bound to a target with another tokenizer: it drafts through text."""
        return self._target is not None and self._vocabularies is None

    def drawn_from(self, sampler: Sampler) -> tuple[Target, Vocabularies] | None:
        # without draws every choice is the law: nothing else has any mass
        own = self.config.proposal != "greedy" and self.config.draft_temperature == 1
        drawn = own or sampler.temperature == 0
        if self._draft is None or self._vocabularies is None or not drawn:
            return None
        return self._draft, self._vocabularies

    # ------------------------------------------------------------------ binding

    def bind(self, target: TargetView) -> None:
        self._target = target
        subset = VocabularySubset.beside(self.config.source)
        if subset is not None:
            subset.check_tokens(target.tokenizer)
        if self._draft is None:
            # beside a subset stands the target's tokenizer, whose ids are not the draft model's
            self._adopt(self._load(target, with_tokenizer=subset is None))
        draft = self._draft
        assert draft is not None
        self._subset_ids = None
        if subset is not None:
            self._subset_ids = subset.vocabularies(draft.vocab_size, target.vocab_size)
            self._vocabularies = self._subset_ids
        elif same_tokens(draft.tokenizer, target.tokenizer):
            self._vocabularies = padded(draft.vocab_size, target.vocab_size)
        else:
            self._vocabularies = None  # another tokenizer: through text
            unusable = {
                "confidence": self.config.confidence != 0,
                "draft_temperature": self.config.draft_temperature != 1,
            }
            for name, given in unusable.items():
                require(
                    not given,
                    f"drafter option {name}: this draft model has another tokenizer than the "
                    "target, and drafts through text; leave the option out",
                )
        self.takes_trees = self._vocabularies is not None

    def _load(self, target: TargetView, *, with_tokenizer: bool) -> Target:
        from draftsmith.targets.hf import load_target

        dtype = self.config.dtype
        if dtype == "auto":
            dtype = str(target.dtype).removeprefix("torch.")
        return load_target(
            self.config.source,
            dtype=dtype,
            device=str(target.device),
            revision=self.config.revision or None,
            with_tokenizer=with_tokenizer,
            weights=self.config.weights,
        )

    # ------------------------------------------------------------------ drafting

    def start(self, request: RequestBatch) -> DraftState:
        if self._draft is None or self._target is None:
            raise self.unbound()
        capacity = max(len(row) for row in request.tokens) + request.max_new_tokens + 64
        kind: type[ReencodedState | _State] = ReencodedState if self.reads_text else _State
        if kind is _State and self._draft.max_length is not None:
            capacity = min(capacity, self._draft.max_length + 64)
        return kind(
            cache=self._draft.new_cache(len(request.tokens), capacity),
            known=[list(row) for row in request.tokens],
            num_prompt=[len(row) for row in request.tokens],
        )

    def propose(
        self,
        state: DraftState,
        shape: TreeShape,
        depth_B: np.ndarray,
        sampler: Sampler,
        noise: Noise,
    ) -> DraftTree:
        if self._draft is None or self._target is None:
            raise self.unbound()
        if isinstance(state, ReencodedState):
            return reencoded_tree(self._draft, self._target, state, shape, depth_B, sampler, noise)
        assert isinstance(state, _State) and self._vocabularies is not None
        depth_B = inside_context(depth_B, state.known, self._draft)
        if not depth_B.any():
            return DraftTree.empty(len(state.known))
        reader = ModelReader(self._draft, state.cache, state.known, self._vocabularies)
        how = ChildSelection(
            self.config.proposal,
            drawing(sampler, self.config.draft_temperature),
            noise,
            state,
            confidence=self.config.confidence,
            rated=self.rates_nodes,
        )
        return grow(reader, shape.clip(int(depth_B.max())), depth_B, how)

    def advance(self, state: DraftState, accepted: Accepted) -> DraftState:
        assert isinstance(state, (ReencodedState, _State))
        # nodes without children were never fed: of an accepted path that can be its last one
        if accepted.tree.fed_BN is not None and isinstance(state, _State):
            path_BD = accepted.verdict.path_BD.numpy()
            fed_BN = accepted.tree.fed_BN.numpy()
            columns_BD = np.take_along_axis(fed_BN, np.maximum(path_BD, 0), axis=1)
            fed = ((path_BD >= 0) & (columns_BD >= 0)).sum(1)
            num = np.minimum(accepted.verdict.num_accepted_B.numpy(), fed)
            state.cache.commit(np.zeros_like(num), columns_BD, num)
        for row, new in zip(state.known, accepted.emitted, strict=True):
            row.extend(new)
        return state

    # ------------------------------------------------------------------ training

    def forward(self, batch: TrajectoryBatch, carry: Any) -> tuple[DraftPrediction, Any]:
        """With a subset of the target's tokens, others are read as in drafting:

        text       the target's ids   7  2  9  4
        d2t        2 4 7, unknown 1   2  0  1  1      what is fed
        """
        ids = self._subset_ids
        if ids is None:
            return causal_forward(self.model, batch), carry
        fed = replace(batch, tokens_BT=ids.to_draft(batch.tokens_BT))
        narrow = self._narrow_head(ids, batch.tokens_BT.device)
        return replace(causal_forward(self.model, fed), narrow=narrow), carry

    def head(self) -> Callable[[Tensor], Tensor]:
        ids, head = self._subset_ids, causal_head(self.model)
        if ids is None:
            return head
        return lambda hidden: ids.to_target(head(hidden), -torch.inf)

    def _narrow_head(self, ids: Vocabularies, device: torch.device) -> NarrowHead:
        """The head over the target's ids, upwards."""
        head = causal_head(self.model)
        if ids.ids_on is not None:
            return NarrowHead(ids_D=ids.ids_on(device), head=head)
        ids_D, order_D = ids.target_ids(torch.arange(ids.known, device=device)).sort()
        return NarrowHead(ids_D=ids_D, head=lambda hidden: head(hidden)[..., order_D])


def causal_forward(model: PreTrainedModel, batch: TrajectoryBatch) -> DraftPrediction:
    """Hidden states after the final norm, predicting one token ahead.

    With `batch.documents_BT` attention stays inside a document and positions restart there:

        documents   0 0 0 1 1        may look   x . . . .
        positions   0 1 2 0 1        at         x x . . .
                                                x x x . .
                                                . . . x .
                                                . . . x x
    """
    tokens_BT = batch.tokens_BT
    mask: Any = None
    positions_BT = batch.positions_BT
    if batch.documents_BT is not None:
        idle_BT = _idle(batch.loss_mask_BT.to(tokens_BT.device), batch.documents_BT)
        last = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if last is not None:
            positions_BT = positions_BT.where(~idle_BT, positions_BT.clamp(max=last - 1))
        mask = _document_masks(model, batch.documents_BT)
    out = model.get_decoder()(
        input_ids=tokens_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False
    )
    return DraftPrediction(
        hidden_BTH=out.last_hidden_state,
        mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool),
        ahead=1,
    )


def _idle(counts_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Places behind the last token that counts in their document, separators and padding: nothing
    that counts sees them, and their positions may lie outside of a model's context."""
    places = counts_BT.shape[1]
    index_BT = torch.arange(places, device=counts_BT.device).expand_as(documents_BT)
    ahead_BT = torch.where(counts_BT, index_BT, places).flip(1).cummin(dim=1).values.flip(1)
    theirs_BT = documents_BT.gather(1, ahead_BT.clamp(max=places - 1))
    return (ahead_BT == places) | (theirs_BT != documents_BT)


def _document_masks(model: PreTrainedModel, documents_BT: Tensor) -> Any:
    """A block-diagonal causal mask in the form that this model's attention takes."""
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedModel(
            f"attention {implementation!r} takes no document mask; load the model with sdpa"
        )
    length = documents_BT.shape[1]
    index = torch.arange(length, device=documents_BT.device)
    distance = index[:, None] - index[None, :]
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    full = (same_BTT & (distance >= 0))[:, None]

    def shaped(allowed: Tensor) -> Tensor:
        if implementation == "sdpa":
            return allowed
        lowest = torch.finfo(model.dtype).min
        return torch.where(allowed, 0.0, lowest).to(model.dtype)

    config = model.config.to_dict()
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = set(config.get("layer_types") or ())
    if not window or kinds == {"full_attention"}:
        return shaped(full)
    narrow = shaped(full & (distance < window))
    return {"full_attention": shaped(full), "sliding_attention": narrow} if kinds else narrow


DRAFTER = Independent
