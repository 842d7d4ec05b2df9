"""Laws in bytes: what comes back, how far off it is at most, and how large it can become."""

from __future__ import annotations

from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftsmith.distill.trajectories import shards
from draftsmith.distill.trajectories.shards import LAW_COLUMNS, decode, encode, error_bound
from draftsmith.distill.trajectories.types import TopK
from draftsmith.errors import BackendError, InputError

LLAMA = 128_256


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float32]:
    total = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return (logits - total).astype(np.float32)


def make_laws(
    N: int, K: int, V: int, *, seed: int = 0, scale: float = 3.0, tail: float = 0.1
) -> TopK:
    """Random distinct ids; `tail` is the probability outside the K."""
    rng = np.random.default_rng(seed)
    ids = [np.sort(rng.choice(V, K, replace=False)) for _ in range(N)]
    log_p_NK = log_softmax(scale * rng.standard_normal((N, K))) + np.float32(np.log1p(-tail))
    return TopK(ids_NK=np.reshape(ids, (N, K)).astype(np.int32), log_p_NK=log_p_NK)


def sums(top: TopK) -> NDArray[np.float64]:
    return np.exp(top.log_p_NK.astype(np.float64)).sum(axis=1)


def check_round_trip(top: TopK, vocab_size: int) -> TopK:
    """Ids exact, -inf where it was, everything else within the bound, no sum above 1."""
    back = decode(encode(top, vocab_size))
    assert back.ids_NK.dtype == np.int32 and back.log_p_NK.dtype == np.float32
    assert back.ids_NK.shape == top.ids_NK.shape
    assert (back.ids_NK == top.ids_NK).all()
    finite_NK = np.isfinite(top.log_p_NK)
    assert (np.isfinite(back.log_p_NK) == finite_NK).all()
    exact_NK = np.where(finite_NK, np.clip(top.log_p_NK.astype(np.float64), -104, 0), 0)
    off_NK = np.abs(np.where(finite_NK, back.log_p_NK, 0) - exact_NK)
    excess_N1 = np.log(np.maximum(sums(top), 1))[:, None]
    assert (off_NK <= error_bound(exact_NK) + excess_N1 + 1e-12).all()
    assert (sums(back) <= 1).all()
    return back


@pytest.mark.parametrize(
    ("N", "K", "V"),
    [(7, 50, LLAMA), (5, 10, 32_000), (9, 1, 17), (4, 16, 17), (3, 17, 17), (1, 1, 1), (2, 7, 64)],
)
def test_ids_come_back_exactly_and_log_probabilities_within_the_bound(
    N: int, K: int, V: int
) -> None:
    for scale in (0.0, 0.3, 3.0, 20.0):
        for tail in (0.0, 1e-6, 0.3):
            check_round_trip(make_laws(N, K, V, scale=scale, tail=tail), V)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_law_survives(data: st.DataObject) -> None:
    V = data.draw(st.integers(1, 300), label="V")
    K = data.draw(st.integers(0, V), label="K")
    N = data.draw(st.integers(0, 5), label="N")
    one_row = st.sets(st.integers(0, V - 1), min_size=K, max_size=K)
    ids = [sorted(data.draw(one_row, label="ids")) for _ in range(N)]
    numbers = st.one_of(st.floats(-200, 0, width=32), st.just(-np.inf))
    rows = data.draw(
        st.lists(st.lists(numbers, min_size=K, max_size=K), min_size=N, max_size=N), label="logits"
    )
    raw_NK = np.reshape(rows, (N, K)).astype(np.float64)
    total_N1 = np.maximum(np.exp(raw_NK).sum(axis=1, keepdims=True), 1)
    log_p_NK = (raw_NK - np.log(total_N1)).astype(np.float32)
    top = TopK(ids_NK=np.reshape(ids, (N, K)).astype(np.int32), log_p_NK=log_p_NK)
    check_round_trip(top, V)


def test_the_drawing_of_ids() -> None:
    ids = np.array([[1, 6, 7, 13]], np.int32)
    laws = encode(TopK(ids_NK=ids, log_p_NK=np.full((1, 4), -2.0, np.float32)), 16)
    low = np.unpackbits(np.frombuffer(laws["laws_ids_low"], np.uint8))[:8].reshape(4, 2)
    assert ["".join(map(str, bits[::-1])) for bits in low] == ["01", "10", "11", "01"]
    line = np.unpackbits(np.frombuffer(laws["laws_ids_high"], np.uint8))[:7]
    assert "".join(map(str, line)) == "1011001"


def test_the_ends_of_the_vocabulary_survive() -> None:
    for V in (2, 3, 50, 51, 99, 100, 101, 255, 256, 257, 50_257, LLAMA, 262_144):
        for K in {1, 2, min(V, 50)}:
            ends = np.r_[0 : K - K // 2, V - K // 2 : V]  # some first ids, some last ones
            ids = np.stack([np.arange(K), np.arange(V - K, V), ends]).astype(np.int32)
            log_p = np.full(ids.shape, np.log(0.5 / K), np.float32)
            check_round_trip(TopK(ids_NK=ids, log_p_NK=log_p), V)


def test_places_come_back_in_order_and_rows_ascending() -> None:
    top = make_laws(20, 12, 500)
    order_NK = np.argsort(np.random.default_rng(1).random(top.ids_NK.shape), axis=1)
    mixed = TopK(
        ids_NK=np.take_along_axis(top.ids_NK, order_NK, axis=1),
        log_p_NK=np.take_along_axis(top.log_p_NK, order_NK, axis=1),
    )
    assert (mixed.ids_NK != top.ids_NK).any()
    assert encode(mixed, 500) == encode(top, 500)


def test_rows_that_are_encoded_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = make_laws(11, 40, 40), make_laws(11, 5, 40)
    expected = [encode(top, 40) for top in (whole, part)]
    monkeypatch.setattr(shards, "_CELLS", 80)
    assert [encode(top, 40) for top in (whole, part)] == expected


def test_nothing_is_a_law_too() -> None:
    for N, K in ((0, 50), (0, 0), (3, 0), (0, 100)):
        back = decode(encode(make_laws(N, K, 100), 100))
        assert back.ids_NK.shape == back.log_p_NK.shape == (N, K)


def test_rows_with_fewer_finite_entries_survive() -> None:
    top = make_laws(6, 8, 100)
    for row in range(6):
        top.log_p_NK[row, row:] = -np.inf  # the first row is empty
    back = check_round_trip(top, 100)
    assert np.isneginf(back.log_p_NK[0]).all()


def test_a_short_row_may_be_filled_up_with_one_id_at_minus_infinity() -> None:
    ids = np.array([[0, 0, 0, 7], [3, 4, 5, 6]], np.int32)
    log_p = np.log(np.array([[0, 0, 0.25, 0.5], [0.1, 0.2, 0.3, 0.4]]) + 1e-300).astype(np.float32)
    log_p[0, :2] = -np.inf
    check_round_trip(TopK(ids_NK=ids, log_p_NK=log_p), 9)


# --------------------------------------------------------------------------- the error


def test_the_largest_entries_have_the_smallest_error() -> None:
    bound = error_bound(np.log(np.array([0.999999, 0.99, 0.5, 0.01, 1e-6])))
    assert (np.diff(bound) > 0).all()
    # in the figures that users read: probabilities, and log-probabilities of a top-50 law
    p = np.linspace(1e-12, 1, 100_001)
    assert (p * np.expm1(error_bound(np.log(p)))).max() < 1.4e-4
    assert error_bound(np.array([-20.0])) < 1.5e-3 and error_bound(np.array([0.0])) < 3e-8


def test_most_errors_are_half_the_bound() -> None:
    top = make_laws(200, 50, 1000, tail=0.2)
    off_NK = np.abs(decode(encode(top, 1000)).log_p_NK - top.log_p_NK)
    assert (off_NK <= 0.51 * error_bound(top.log_p_NK)).all()


def test_errors_do_not_all_lean_to_one_side() -> None:
    top = make_laws(400, 50, 1000, tail=0.2)
    off_NK = decode(encode(top, 1000)).log_p_NK.astype(np.float64) - top.log_p_NK
    # uniform in +-bound/2: the mean of 20,000 has a deviation of 0.002 bounds; 6 deviations
    assert abs((off_NK / error_bound(top.log_p_NK)).mean()) < 0.0125


def test_a_point_mass_is_exact() -> None:
    log_p = np.full((2, 5), -np.inf, np.float32)
    log_p[:, 2] = 0
    top = TopK(ids_NK=np.tile(np.arange(5, dtype=np.int32), (2, 1)), log_p_NK=log_p)
    for V in (5, 9):
        assert (decode(encode(top, V)).log_p_NK == log_p).all()


def test_what_was_decoded_is_encoded_without_further_loss() -> None:
    for V, tail in ((30, 0.0), (60, 0.0), (60, 0.4)):
        once = decode(encode(make_laws(50, 30, V, tail=tail), V))
        again = decode(encode(once, V))
        assert (again.log_p_NK == once.log_p_NK).all()


def test_sums_stay_at_most_one_for_whole_laws_in_float32() -> None:
    exceeded = 0
    for seed, scale in enumerate((0.0, 0.1, 1.0, 5.0, 30.0)):
        top = make_laws(200, 64, 64, seed=seed, scale=scale, tail=0.0)
        exceeded += int((sums(top) > 1).sum())  # by rounding, before it was encoded
        back = check_round_trip(top, 64)
        assert (sums(back) > 0.999).all()
    assert exceeded > 100  # or this test has tested nothing


def test_rounding_downwards_is_never_above_even_between_two_float32_numbers() -> None:
    grid_N1 = -np.square(np.arange(shards.NOTHING) * shards.STEP)[:, None]
    above_N1 = shards._LOG_P[:-1, None] > grid_N1
    assert above_N1.any()  # the float32 of the table lies above the float64 of the formula
    codes_N1 = shards._codes_below(grid_N1, np.ones(len(grid_N1)))
    assert (shards._LOG_P[codes_N1] <= grid_N1)[:-1].all()  # but the last, where values are cut


def test_values_below_the_range_are_cut_and_stay_finite() -> None:
    log_p = np.array([[-0.5, -103.0, -104.0, -1e4, -np.inf, -3e38]], np.float32)
    top = TopK(ids_NK=np.arange(6, dtype=np.int32)[None], log_p_NK=log_p)
    back = check_round_trip(top, 10).log_p_NK[0]
    assert (back[[2, 3, 5]] == -104).all() and back[4] == -np.inf
    assert (np.exp(back[[2, 3, 5]]) == 0).all()  # in float32


# --------------------------------------------------------------------------- the size


@pytest.mark.parametrize("ids", ["spread", "first", "last", "random"])
def test_no_content_makes_laws_larger(ids: str) -> None:
    N, K = 64, 50
    rows = {
        "spread": np.tile(np.linspace(0, LLAMA - 1, K).astype(np.int32), (N, 1)),
        "first": np.tile(np.arange(K, dtype=np.int32), (N, 1)),
        "last": np.tile(np.arange(LLAMA - K, LLAMA, dtype=np.int32), (N, 1)),
        "random": make_laws(N, K, LLAMA).ids_NK,
    }
    top = TopK(ids_NK=rows[ids], log_p_NK=make_laws(N, K, LLAMA, scale=9.0).log_p_NK)
    check_round_trip(top, LLAMA)
    laws = encode(top, LLAMA)
    assert len(laws.pop("laws_head")) < 16
    assert sum(map(len, laws.values())) / N == 182.75  # as the module says


def test_whole_laws_store_no_ids() -> None:
    laws = encode(make_laws(3, 1000, 1000, tail=0.0), 1000)
    assert sum(len(laws[name]) for name in LAW_COLUMNS[1:]) == 2 * 3 * 1000
    assert (decode(laws).ids_NK == np.arange(1000)).all()


def test_ids_take_less_than_two_bits_more_than_any_code_needs() -> None:
    for K, V in ((1, 1000), (10, LLAMA), (50, LLAMA), (200, LLAMA), (50, 64), (300, 1000)):
        laws = encode(make_laws(16, K, V), V)
        bits = 8 * (len(laws["laws_ids_low"]) + len(laws["laws_ids_high"])) / 16
        assert bits <= log2(comb(V, K)) + 2 * K + 2, (K, V)


# --------------------------------------------------------------------------- refusals


def law(ids: object, log_p: object) -> TopK:
    return TopK(ids_NK=np.array(ids, np.int64), log_p_NK=np.array(log_p, np.float32))


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (law([[1, 9]], [[-1, -2]]), "ids from 1 to 9, the vocabulary has 9 tokens"),
        (law([[-1, 2]], [[-1, -2]]), "ids from -1 to 2"),
        (law([[1, 2**33]], [[-1, -2]]), "the vocabulary has 9 tokens"),
        (law([[1, 2]], [[-1, -2, -3]]), "same shape"),
        (law([1, 2], [-1, -2]), "same shape"),
        (law([range(10)], [[-9] * 10]), "logprobs of 10 ids do not fit 9 tokens"),
        (law([[1, 2], [3, 3]], [[-1, -2]] * 2), "place 1 holds an id twice"),
        (law([[3, 2, 3]], [[-1, -2, -3]]), "holds an id twice"),
        (law([[1, 2]], [[5.0, 3.0]]), "not logits"),
        (law([[1, 2]], [[-0.1, -0.2]]), "sum to more than 1"),
        (law([[1, 2]], [[np.nan, -2]]), "not a number"),
        (law([[1, 2]], [[np.inf, -2]]), "not logits"),
    ],
)
def test_what_is_no_law_is_refused(top: TopK, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode(top, 9)


@pytest.mark.parametrize("part", LAW_COLUMNS)
@pytest.mark.parametrize("cut", ["shorter", "longer", "empty"])
def test_parts_of_the_wrong_length_are_refused(part: str, cut: str) -> None:
    laws = encode(make_laws(4, 6, 200), 200)
    data = laws[part]
    damaged = {"shorter": data[:-1], "longer": data + b"\0", "empty": b""}[cut]
    with pytest.raises(BackendError):
        decode(laws | {part: damaged})


def test_another_version_is_named() -> None:
    laws = encode(make_laws(4, 6, 200), 200)
    with pytest.raises(BackendError, match=r"version 2.*version 1"):
        decode(laws | {"laws_head": b"\2" + laws["laws_head"][1:]})


def test_any_flipped_bit_of_the_marks_is_refused() -> None:
    laws = encode(make_laws(4, 6, 200), 200)
    used = 4 * (6 + (199 >> 5))
    for bit in range(used):
        damaged = bytearray(laws["laws_ids_high"])
        damaged[bit // 8] ^= 128 >> bit % 8
        with pytest.raises(BackendError, match="damaged"):
            decode(laws | {"laws_ids_high": bytes(damaged)})
