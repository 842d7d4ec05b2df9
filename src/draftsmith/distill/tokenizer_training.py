"""Tokenizers for pre-training: a target's, or a byte-level BPE of one's own; and token arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.errors import BackendError, InputError
from draftsmith.provenance import atomic_path, recorded
from draftsmith.targets import hf as targets_hf
from draftsmith.targets.gguf import checkpoint
from draftsmith.targets.support import context_of

Tokens = NDArray[np.int32]

END_TOKEN = "<|endoftext|>"
ORIGIN_FILE = "made_from.json"
"""Beside a tokenizer of our own: the options and the text it comes from."""


def train_bpe(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens; every text can be encoded and given back.

    The end token is id 0 and serves as begin and padding too.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=END_TOKEN,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Raises BackendError if there is none, InputError if it has no end token.
    """
    tokenizer: Any = targets_hf.load_tokenizer(source)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {source} has no end token to put between documents")
    return tokenizer


def text_config(source: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The text part of a target's configuration, without its weights. Raises BackendError."""
    with targets_hf.loading(f"the configuration of {source!r}"):
        config = AutoConfig.from_pretrained(
            checkpoint(source), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    text = config.get_text_config(decoder=True)
    context_of(text, source)
    return text


def keep(tokenizer: Any, folder: Path, origin: Mapping[str, object]) -> None:
    """Save a tokenizer and what it was made from, as a whole folder or not at all.

    Raises BackendError (disk, rights).
    """
    with atomic_path(folder) as part:
        tokenizer.save_pretrained(part)
        (part / ORIGIN_FILE).write_text(json.dumps(origin, indent=1), encoding="utf-8")


def is_kept(folder: Path, origin: Mapping[str, object] | None = None) -> bool:
    """Whether `folder` holds a tokenizer, and one made from this if it is given."""
    made = origin is None or bool(recorded(folder / ORIGIN_FILE) == origin)
    return made and (folder / "tokenizer.json").exists()


def kept(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `keep` saved, alone in its folder. Raises BackendError (damaged)."""
    with targets_hf.loading(f"the tokenizer in {folder}"):
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def sha256(tokenizer: Any, source: Path) -> str:
    """Digest of `tokenizer.json` in the folder it was read from; `content_sha256` where there is no
    such file (a hub id, an older kind of tokenizer). Raises BackendError: it cannot be read."""
    file = source / "tokenizer.json"
    try:
        content = file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise BackendError(f"cannot read {file}: {error.strerror or error}") from error
    return content_sha256(tokenizer) if content is None else hashlib.sha256(content).hexdigest()


def content_sha256(tokenizer: Any) -> str:
    """Digest of what `tokenizer.json` says, however it is written; of the vocabulary of an older
    kind of tokenizer."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = sorted(tokenizer.get_vocab().items()) if fast is None else None
    content = json.dumps(vocabulary) if fast is None else fast.to_str()
    return hashlib.sha256(content.encode()).hexdigest()


def encode(tokenizer: Any, texts: Iterable[str], *, batch: int = 256) -> tuple[list[Tokens], int]:
    """Token ids of each text, without special tokens, and the number of UTF-8 bytes read."""
    encoded: list[Tokens] = []
    size = 0
    source = iter(texts)
    while group := list(islice(source, batch)):
        size += sum(len(text.encode()) for text in group)
        ids = tokenizer(group, add_special_tokens=False, verbose=False)["input_ids"]
        encoded += [np.asarray(row, np.int32) for row in ids]
    return encoded, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Subset:
    """A reduced vocabulary."""

    ids: Tokens
    """The target's id of each id, ascending."""
    unknown: int
    """The (reduced) id that every other token is fed as."""


def choose_subset(counts: NDArray[np.int64], keep: int, always: set[int]) -> Subset:
    """The most frequent tokens; others are fed as the rarest ordinary one, never as an end."""
    ids = most_frequent(counts, keep, always)
    rarest = min(
        (token for token in ids.tolist() if token not in always),
        key=lambda token: (counts[token], -token),
        default=int(ids[0]),
    )
    return Subset(ids=ids, unknown=int(np.searchsorted(ids, rarest)))


def token_counts(documents: Iterable[Tokens], vocab_size: int) -> NDArray[np.int64]:
    """How often each id occurs."""
    counts = np.zeros(vocab_size, np.int64)
    for document in documents:
        counts += np.bincount(document, minlength=vocab_size)
    return counts


def most_frequent(counts: NDArray[np.int64], keep: int, always: set[int]) -> Tokens:
    """Ids of the `keep` most frequent tokens with all of `always`, ascending.

    Ties go to the smaller id. Raises InputError when `keep` leaves no room beside `always`.
    """
    if not len(always) < keep <= len(counts):
        raise InputError(
            f"--vocab-subset {keep} must lie between {len(always) + 1} (one token more than the "
            f"special ones) and {len(counts)} (all tokens)"
        )
    counts = counts.copy()
    counts[sorted(always)] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:keep]).astype(np.int32)


def into_subset(documents: Iterable[Tokens], subset: Tokens, vocab_size: int) -> Iterator[Tokens]:
    """Documents in the subset's own ids; -1 stands for a token outside it.

    subset {1, 4, 7}     document 4 7 2 1 1     becomes  1 2 -1 0 0
    """
    place = np.full(vocab_size, -1, np.int32)
    place[subset] = np.arange(len(subset), dtype=np.int32)
    for document in documents:
        yield place[document]
