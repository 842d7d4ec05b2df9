"""How many bytes a teacher's laws take on disk, and what they lose: nothing here is a time.

    python benchmarks/distillation/storage.py [--tokens 4096] [--out benchmarks/results]

Laws over 128,256 tokens whose frequencies follow Zipf's law: at every place, noise is added to the
log-frequencies and a random sharpness applied, so that some places are almost certain and others
wide open; then the K most probable are kept. Ids without any regularity stand beside them as the
worst case. Each row writes a real store: all its files count, tokens and prompts included.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftsmith.distill.trajectories.shards import error_bound
from draftsmith.distill.trajectories.store import StoreHeader, TrajectoryStore
from draftsmith.distill.trajectories.types import TopK, Trajectory
from draftsmith.provenance import machine_summary, versions, write_json_atomic

RESULTS = Path(__file__).parents[1] / "results"
VOCABULARY = 128_256
DENSE = 2 * VOCABULARY
"""Bytes of a whole law in float16."""
LENGTH = 128
"""Tokens of a continuation; its prompt is half as long."""
WIDEST = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One store, measured."""

    ids: str
    top_k: int
    tokens: int
    bytes_per_token: float
    """All files of the store / tokens of the continuations."""
    reduction: float
    """Dense float16 / bytes per token."""
    kept_mass: float
    """Mean probability of the K tokens."""
    largest_sum: float
    """The largest sum of the decoded probabilities of one position."""
    log_p_error_mean: float
    """Nats."""
    log_p_error_max: float
    log_p_error_of_bound: float
    """Largest ratio of an error to its stated bound."""
    p_error_max: float
    kl_mean: float
    """Mean divergence of the decoded law from the exact one, both renormalised, nats."""


def zipf(rng: np.random.Generator) -> TopK:
    """The 200 most probable tokens of one place of a text, ascending."""
    log_frequency_V = -np.log(np.arange(VOCABULARY, dtype=np.float32) + 2.7)
    noise_V = 2.5 * rng.standard_normal(VOCABULARY, dtype=np.float32)
    logits_V = ((log_frequency_V + noise_V) * rng.uniform(0.7, 2.2)).astype(np.float64)
    log_p_V = logits_V - np.logaddexp.reduce(logits_V)
    ids_K = np.sort(np.argpartition(-log_p_V, WIDEST)[:WIDEST])
    return TopK(
        ids_NK=ids_K[None].astype(np.int32), log_p_NK=log_p_V[ids_K][None].astype(np.float32)
    )


def scattered(rng: np.random.Generator) -> TopK:
    """The same log-probabilities on ids drawn uniformly."""
    ids_K = np.sort(rng.choice(VOCABULARY, WIDEST, replace=False))
    return TopK(ids_NK=ids_K[None].astype(np.int32), log_p_NK=zipf(rng).log_p_NK)


LAWS: dict[str, Callable[[np.random.Generator], TopK]] = {
    "zipf": zipf,
    "uniformly random": scattered,
}


def make_laws(kind: str, count: int) -> TopK:
    rng = np.random.default_rng(0)
    laws = [LAWS[kind](rng) for _ in range(count)]
    return TopK(
        ids_NK=np.concatenate([law.ids_NK for law in laws]),
        log_p_NK=np.concatenate([law.log_p_NK for law in laws]),
    )


def narrow(laws: TopK, top_k: int) -> TopK:
    """The `top_k` most probable of each place, ascending."""
    best_NK = np.argpartition(-laws.log_p_NK, top_k - 1, axis=1)[:, :top_k]
    best_NK.sort(axis=1)
    return TopK(
        ids_NK=np.take_along_axis(laws.ids_NK, best_NK, axis=1),
        log_p_NK=np.take_along_axis(laws.log_p_NK, best_NK, axis=1),
    )


def make_trajectories(laws: TopK) -> list[Trajectory]:
    """Continuations whose tokens are drawn from their laws."""
    rng = np.random.default_rng(1)
    noisy_NK = laws.log_p_NK + rng.gumbel(size=laws.log_p_NK.shape)
    tokens_N = np.take_along_axis(laws.ids_NK, noisy_NK.argmax(axis=1)[:, None], axis=1)[:, 0]
    out = []
    for number, start in enumerate(range(0, len(laws), LENGTH)):
        cut = slice(start, start + LENGTH)
        tokens = tuple(tokens_N[cut].tolist())
        out.append(
            Trajectory(
                prompt_id=f"prompt-{number:06d}",
                forcing="sample",
                temperature=1.0,
                prompt=tuple(rng.permutation(tokens)[: LENGTH // 2].tolist()),
                tokens=tokens,
                score=float(laws.log_p_NK[cut].max(axis=1).sum()),
                top=TopK(ids_NK=laws.ids_NK[cut], log_p_NK=laws.log_p_NK[cut]),
                language="en",
                tag="chat",
            )
        )
    return out


def measure(kind: str, laws: TopK) -> Row:
    """Write a store, read it back, and compare."""
    top_k = laws.ids_NK.shape[1]
    header = StoreHeader(
        target="made-up laws",
        tokenizer_sha256="0" * 64,
        vocab_size=VOCABULARY,
        top_k=top_k,
        settings={"forcing": "sample"},
        prompts_sha256="0" * 64,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = TrajectoryStore.create(Path(folder), header)
        store.write(0, make_trajectories(laws))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        found = [trajectory.top for trajectory in store.trajectories()]
    decoded_NK = np.concatenate([top.log_p_NK for top in found if top is not None])
    ids_NK = np.concatenate([top.ids_NK for top in found if top is not None])
    assert (ids_NK == laws.ids_NK).all()
    exact_NK = laws.log_p_NK.astype(np.float64)
    off_NK = np.abs(decoded_NK - exact_NK)
    p_NK, q_NK = np.exp(exact_NK), np.exp(decoded_NK.astype(np.float64))
    return Row(
        ids=kind,
        top_k=top_k,
        tokens=len(laws),
        bytes_per_token=size / len(laws),
        reduction=DENSE * len(laws) / size,
        kept_mass=float(p_NK.sum(axis=1).mean()),
        largest_sum=float(q_NK.sum(axis=1).max()),
        log_p_error_mean=float(off_NK.mean()),
        log_p_error_max=float(off_NK.max()),
        log_p_error_of_bound=float((off_NK / error_bound(exact_NK)).max()),
        p_error_max=float(np.abs(p_NK - q_NK).max()),
        kl_mean=float(divergence(p_NK, q_NK).mean()),
    )


def divergence(p_NK: NDArray[np.float64], q_NK: NDArray[np.float64]) -> NDArray[np.float64]:
    p_NK = p_NK / p_NK.sum(axis=1, keepdims=True)
    q_NK = q_NK / q_NK.sum(axis=1, keepdims=True)
    # sum of p log(p/q) - p + q: the same for laws, and no difference of large terms
    terms_NK = p_NK * np.log(p_NK / q_NK) - p_NK + q_NK
    return np.asarray(terms_NK.sum(axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of all continuations together")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args()
    rows = []
    for kind in LAWS:
        widest = make_laws(kind, given.tokens)
        rows += [measure(kind, narrow(widest, top_k)) for top_k in (10, 50, WIDEST)]
    print("| ids | K | bytes per token | of dense float16 | kept mass | largest error of p |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.ids} | {row.top_k} | {row.bytes_per_token:.1f} | 1/{row.reduction:,.0f} "
            f"| {row.kept_mass:.3f} | {row.p_error_max:.1e} |"
        )
    content = {
        "vocabulary": VOCABULARY,
        "dense_float16_bytes_per_token": DENSE,
        "bar": {"top_k": 50, "bytes_per_token": 200},
        "met": all(row.bytes_per_token <= 200 for row in rows if row.top_k == 50),
        "versions": versions(),
        "machine": machine_summary(),
        "rows": [asdict(row) for row in rows],
    }
    write_json_atomic(given.out / "distillation_storage.json", content)


if __name__ == "__main__":
    main()
