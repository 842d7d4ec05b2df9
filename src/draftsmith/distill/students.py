"""What `draftsmith distill` trains: a draft model, or a network over the target's hidden states.

--drafter runs/my-draft              a transformers model                   ModelStudent
--drafter griffin                    a network that begins from nothing     NetworkStudent
--drafter griffin:runs/griffin       one that goes on learning              NetworkStudent
"""

from __future__ import annotations

import abc
import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.config import as_dict
from draftsmith.core.speedup import tokens_per_step
from draftsmith.distill import tokenizer_training
from draftsmith.distill.batches import EvaluationSource
from draftsmith.distill.checkpoint import finished_folder, model_ending, save_model
from draftsmith.distill.config import DistillConfig, ImitationConfig
from draftsmith.distill.datasets import TrainingData
from draftsmith.distill.evaluation import (
    AcceptanceEvaluation,
    ChainEvaluation,
    ChainFigure,
    Evaluation,
)
from draftsmith.distill.objectives.distillation import Distillation, Imitation, Objective
from draftsmith.drafters.base import ADDED, COST, READING, Drafter, options_marked
from draftsmith.drafters.config import drafter_parts, kinds
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.registry import drafter_class, make_drafter, takes_source
from draftsmith.drafters.tree_growth import Vocabularies
from draftsmith.drafters.vocabulary import OverTargetTokens, VocabularySubset, same_tokens
from draftsmith.errors import InputError, nearest
from draftsmith.provenance import Run
from draftsmith.targets.base import Target
from draftsmith.targets.hf import EmbeddingAndHead, HFTarget, load_model

DRAWN: ChainFigure = "tokens_per_step_t1"
"""The figure of chains that is exact for texts drawn at temperature 1."""


@dataclass(frozen=True, slots=True)
class DrawingCopy:
    """A copy of a student that draws continuations in the target's tokens."""

    target: Target
    learner: Drafter
    """Its weights, which are brought up to date now and then."""


class StudentBase(abc.ABC):
    """A drafter that is to be trained, and how it is measured and written."""

    learner: Drafter
    figure: str
    """The held-out figure by which the best weights are chosen; a larger one is better."""
    vocab_size: int | None = None
    """Tokens that it can read, rows of padding counted; None: all of the target's."""
    share_outside_vocabulary: float | None = None
    """Share of the answers' tokens outside the draft vocabulary; None: it is whole, a network's
    that was chosen by other answers, or the answers are still to be drawn."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must agree on, as JSON."""
        return {"drafter": weights_digest(self.learner.state_dict())}

    @abc.abstractmethod
    def _adopt(self) -> None:
        """Load `learner`, not yet trained."""

    def fresh_copy(self) -> Self:
        """The same, not yet trained: it takes the weights of a run that holds them in parts."""
        other = copy.copy(self)
        other._adopt()
        return other

    @abc.abstractmethod
    def set_token_counts(self, count_tokens: Callable[[], Tensor] | None) -> None:
        """Take, before the first step, what counts how often the answers hold each token, [V].

        None: the answers are still to be drawn.
        """

    def _share_outside(self, counts_V: Tensor, ids_D: Tensor) -> None:
        every, known = counts_V.sum().item(), counts_V[ids_D.cpu()].sum().item()
        self.share_outside_vocabulary = (every - known) / every

    def _outside_facts(self) -> dict[str, Any]:
        share = self.share_outside_vocabulary
        return {} if share is None else {"share_outside_vocabulary": share}

    def target_ends(self) -> EmbeddingAndHead:
        """The target's head, which turns the hidden states that this reads into logprobs;
        InputError: it reads none, or not those after the final norm."""
        raise InputError(
            "--laws states is for drafters that read the target's last hidden states (eagle, hass, "
            "fspad, griffin, unrolled, medusa, parallel): learn what the store holds, or give "
            "--laws teacher"
        )

    def drawing_copy(self) -> DrawingCopy:
        """A copy that can draw continuations; InputError: it cannot without the target."""
        raise InputError("--on-policy is for draft models: others draft only beside the target")


def open_student(options: DistillConfig, tokenizer: Any) -> Student:
    """The drafter in float32, ready to learn.

    Raises:
        InputError: it learns nothing, or has other tokens than the target.
        BackendError: its subset of the target's tokens is damaged, or one of another target's.
    """
    kind, source = drafter_parts(options.drafter)
    bare = source is None and "/" not in kind and not Path(kind).exists()
    # a misspelt kind is refused here; a hub id has no colon
    if kind in kinds() or source is not None or (bare and nearest(kind, kinds())):
        cls = drafter_class(kind)
    else:
        cls = Independent  # a model's hub id
    if not cls.trains:
        raise InputError(f"drafter {kind!r} has no weights: there is nothing to distil into it")
    if issubclass(cls, Independent):
        if kind in kinds() and not source:
            raise InputError(f"--drafter {kind} needs a model: name its folder or hub id")
        return ModelStudent(options, tokenizer)
    if not takes_source(cls):
        raise InputError(
            f"drafter {kind!r} trains, but its Config has no field `source`: it could never be "
            "loaded again"
        )
    return NetworkStudent(options, tokenizer)


class ModelStudent(StudentBase):
    """A transformers model with the target's tokens, or a subset of them."""

    figure = "acceptance"

    def __init__(self, options: DistillConfig, tokenizer: Any) -> None:
        if options.drafter_option:
            raise InputError("--drafter-option is for drafters with options, not for draft models")
        if options.imitation != ImitationConfig():
            raise InputError(
                "--token-weight, --feature-weight, --top-weight and --mean-over are for drafters "
                "over hidden states: a draft model learns the divergence alone"
            )
        self._source = drafter_parts(options.drafter)[1] or options.drafter
        self._tokenizer = tokenizer
        self._subset = VocabularySubset.beside(self._source)
        self._subset_ids: Vocabularies | None = None
        head = int(tokenizer_training.text_config(self._source).vocab_size)
        target_size = int(tokenizer_training.text_config(options.target).vocab_size)
        if self._subset is None:
            self._check_all_tokens(head, target_size)
            self.vocab_size = head
        else:
            self._subset.check_tokens(tokenizer)
            self._subset_ids = self._subset.vocabularies(head, target_size)
            self.vocab_size = target_size  # what it does not know it reads, too
        self._adopt()

    def _check_all_tokens(self, head: int, target_size: int) -> None:
        tokenizer = self._tokenizer
        if not same_tokens(tokenizer_training.load_tokenizer(self._source), tokenizer):
            raise InputError(
                f"{self._source} has another tokenizer than the target: its tokens cannot imitate "
                "the target's laws; pretrain one with --tokenizer TARGET"
            )
        tokens = max(tokenizer.get_vocab().values()) + 1
        if head < min(tokens, target_size):
            raise InputError(
                f"{self._source} has a head of {head} entries, and the tokenizer {tokens} tokens: "
                "it could neither read nor say the last of them; enlarge it (in transformers "
                f"model.resize_token_embeddings({tokens})), or distil another draft model"
            )

    def _adopt(self) -> None:
        self.model: PreTrainedModel = load_model(self._source, dtype="float32")
        self.model.train().requires_grad_(True)
        self.learner = Independent.learner(self.model, self._subset_ids)

    @property
    def identity(self) -> dict[str, Any]:
        if self._subset is None:
            return super().identity
        vocabulary = {"d2t": self._subset.d2t, "unknown": torch.tensor(self._subset.unknown)}
        return super().identity | {"vocabulary": weights_digest(vocabulary)}

    def facts(self, held_out: Mapping[str, float]) -> dict[str, Any]:
        alpha, gamma = held_out.get(self.figure), self.learner.default_shape.depth
        tau = None if alpha is None else float(tokens_per_step(alpha, gamma))
        return {
            "decoding_temperature": 1.0,
            "gamma": gamma,
            "tau_predicted": tau,
            **self._outside_facts(),
        }

    def set_token_counts(self, count_tokens: Callable[[], Tensor] | None) -> None:
        known = self.share_outside_vocabulary is not None  # a fresh copy has it
        if self._subset is not None and count_tokens is not None and not known:
            self._share_outside(count_tokens(), self._subset.d2t)

    def check(self, data: TrainingData) -> None:
        assert self.vocab_size is not None
        if data.highest is not None and data.highest >= self.vocab_size:
            raise InputError(
                f"{self._source} has a head of {self.vocab_size} entries, and a text holds token "
                f"{data.highest}, from the padding of the target's larger head: enlarge it (in "
                f"transformers model.resize_token_embeddings({data.highest + 1})), or leave such "
                "prompts out when you collect"
            )
        config = self.model.config.get_text_config(decoder=True)
        context: int | None = getattr(config, "max_position_embeddings", None)
        if context is not None and data.furthest > context:
            raise InputError(
                f"{self._source} has a context of {context} tokens, and the longest text has up to "
                f"{data.furthest}: give --block-length {context} or less, which cuts what is "
                "longer, or with --long-texts drop leaves it out of what a --store holds"
            )

    def drawing_copy(self) -> DrawingCopy:
        """A copy that can draw continuations."""
        model, name = copy.deepcopy(self.model), "the draft model"
        weights = Independent.learner(model)
        if self._subset_ids is None:
            return DrawingCopy(HFTarget(model, self._tokenizer, name=name), weights)
        draft = HFTarget(model, None, name=name)
        return DrawingCopy(OverTargetTokens(draft, self._subset_ids, self._tokenizer), weights)

    def objective(self, token: Distillation) -> Objective:
        return token

    def evaluation(self, held_out: EvaluationSource, forcing: str) -> Evaluation:
        return AcceptanceEvaluation(batches=held_out, name=self.figure, chooses=True)

    def write(
        self, options: DistillConfig, record: Run, results: Mapping[str, object], text: str
    ) -> None:
        readme = text + model_ending(self._subset)
        with finished_folder(options.out, record, results, readme) as folder:
            save_model(folder, self.model, self._tokenizer, self._subset, options.save_dtype)


class NetworkStudent(StudentBase):
    """A drafter with a network of its own over what it borrows of the target."""

    figure = "tokens_per_step"

    def __init__(self, options: DistillConfig, tokenizer: Any) -> None:
        self._options = options
        self._kind, _ = drafter_parts(options.drafter)
        config = tokenizer_training.text_config(options.target)
        self._ends = EmbeddingAndHead.load(options.target, config, tokenizer)
        self._longest = options.training.block_length
        self._adopt()

    def target_ends(self) -> EmbeddingAndHead:
        return self._ends if self.learner.signals.last_hidden else super().target_ends()

    def _adopt(self) -> None:
        self.learner = make_drafter(self._options.drafter, self._options.drafter_option)
        self.learner.bind(self._ends)
        self.learner.train().requires_grad_(True)

    def facts(self, held_out: Mapping[str, float]) -> dict[str, Any]:
        config = self._options_but(READING) | {"source": ""}
        usual = as_dict(type(self.learner).Config())
        weights = self._imitation()
        aside = options_marked(self.learner.config, COST) | {"seed"}  # of one setting all the same
        named = {k: v for k, v in config.items() if v != usual[k] and k not in aside}
        named |= {key: value for key, value in weights.items() if value is not None}
        name = " ".join([self._kind, *(f"{key}={value}" for key, value in named.items())])
        return {
            "drafter": name,
            "drafter_options": config,
            "imitation": weights,
            "tau_predicted": held_out.get(self.figure),
            "decoding_temperature": 1.0 if self.figure == DRAWN else 0.0,
            **self._outside_facts(),
        }

    def _imitation(self) -> dict[str, Any]:
        """What is learnt beside the divergence; `mean_over` where it is not the usual one, as in
        records of versions without it."""
        given = as_dict(self._options.imitation)
        usual = ImitationConfig().mean_over
        return {k: v for k, v in given.items() if (k, v) != ("mean_over", usual)}

    def check(self, data: TrainingData) -> None:
        least = self.learner.num_steps + 2  # forward n says what stands n + 1 places further
        if data.longest < least:
            raise InputError(
                f"{self._kind} learns {self.learner.num_steps} tokens ahead, from texts of at "
                f"least {least} tokens, and the longest that fits has {data.longest}: give a "
                "larger --block-length, longer answers, or fewer forwards, heads or tokens of a "
                "block"
            )
        # plain text fills its blocks
        block = self._options.training.block_length
        self._longest = block if self._options.text else data.longest

    def set_token_counts(self, count_tokens: Callable[[], Tensor] | None) -> None:
        counts_V = None
        if count_tokens is not None and self.learner.wants_token_counts:
            counts_V = count_tokens()
        self.learner.choose_vocabulary(counts_V)
        ids_D = self.learner.draft_ids
        if counts_V is not None and ids_D is not None:
            self._share_outside(counts_V, ids_D)

    @property
    def identity(self) -> dict[str, Any]:
        options = self._options_but(COST, READING) | self._imitation()
        return super().identity | {"drafter_options": options}

    def _options_but(self, *marks: Mapping[str, object]) -> dict[str, Any]:
        """The drafter's options without those of these marks, and without what earlier versions did
        not know and is as it was then."""
        config = self.learner.config
        given, usual = as_dict(config), as_dict(type(config)())
        aside = {name for mark in marks for name in options_marked(config, mark)}
        aside |= {name for name in options_marked(config, ADDED) if given[name] == usual[name]}
        return {name: value for name, value in given.items() if name not in aside}

    def objective(self, token: Distillation) -> Objective:
        given, own = self._options.imitation, self.learner.loss_weights
        if given.feature_weight and not own.feature:
            raise InputError(
                f"--feature-weight {given.feature_weight:g}: {self._kind} imitates no states; "
                "leave it out"
            )
        if given.top_weight and token.record.hard:
            raise InputError(
                f"--top-weight {given.top_weight:g}: --objective {token.objective} learns from "
                "tokens, not from laws; leave one of them out"
            )
        if self.learner.learns_acceptance and token.record.hard:
            raise InputError(
                f"--objective {token.objective} learns from tokens, and the confidence head of "
                f"{self._kind} from laws; leave one of them out"
            )
        token_weight = own.token if given.token_weight is None else given.token_weight
        top = own.top if token_weight and not token.record.hard else 0.0
        return Imitation(
            token=token,
            token_weight=token_weight,
            feature_weight=own.feature if given.feature_weight is None else given.feature_weight,
            top_weight=top if given.top_weight is None else given.top_weight,
            mean_over=given.mean_over,
        )

    def evaluation(self, held_out: EvaluationSource, forcing: str) -> Evaluation:
        # each of the two is exact for the texts of its own temperature
        name: ChainFigure = DRAWN if "sample" in forcing else "tokens_per_step"
        self.figure = name
        return ChainEvaluation(batches=held_out, name=name, chooses=True)

    def write(
        self, options: DistillConfig, record: Run, results: Mapping[str, object], text: str
    ) -> None:
        readme = text + "\n    draftsmith bench --target TARGET --drafter FOLDER --suite PROMPTS\n"
        self.learner.trained_length = self._trained_length()
        with finished_folder(options.out, record, results, readme) as folder:
            self.learner.to(getattr(torch, options.save_dtype)).save(folder, kind=self._kind)

    def _trained_length(self) -> int | None:
        """Tokens of the longest text of this run and of those that it goes on from, as far as a
        block goes; None: their folder does not tell."""
        before = self.learner.trained_length
        if not as_dict(self.learner.config)["source"]:  # it begins from nothing
            return self._longest
        return None if before is None else max(before, self._longest)


Student = ModelStudent | NetworkStudent


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of all weights and their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
