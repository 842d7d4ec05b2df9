"""Several live translations in the same forwards: everyone gets what they get alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.live_cases import a_stream, a_target, a_translator

from draftsmith.core.types import ALIGNED, DecodeStep
from draftsmith.live.config import LiveConfig
from draftsmith.live.records import UpdateRecord
from draftsmith.live.translator import InFlightUpdate, LiveTranslator
from draftsmith.targets.hf import HFTarget


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return a_target()


@pytest.mark.parametrize("bias", [0.0, 0.3])
@pytest.mark.parametrize("resync", [0, 4])
@pytest.mark.every(3)
def test_side_by_side_everyone_gets_what_they_get_alone(
    target: HFTarget, bias: float, resync: int
) -> None:
    """Eight translations, some of which pause, in the same forwards."""
    options = {"bias": bias, "resync": resync, "max_extra": 12}
    streams = [a_stream(seed) for seed in range(8)]
    expected = [_alone(a_translator(target, **options), stream) for stream in streams]
    together = [a_translator(target, **options) for _ in streams]
    made: list[list[UpdateRecord | None]] = [[] for _ in streams]
    batches = 0
    for turn in range(2 * max(map(len, streams))):
        asked = {}
        for n, (stream, translator) in enumerate(zip(streams, together, strict=True)):
            if (turn + n) % 2 or len(made[n]) == len(stream):
                continue
            source, final = stream[len(made[n])]
            if translator.last is not None and source == translator.source and not final:
                made[n].append(translator.last)
            else:
                asked[n] = translator.begin(source, final=final)
        if not asked:
            continue
        done: list[int] = []
        list(
            together[0].engine.steps(
                list(asked.values()), [together[n].session for n in asked], done.append
            )
        )
        assert sorted(done) == list(range(len(asked)))
        for n, update in asked.items():
            made[n].append(together[n].finish(update))
        batches += 1
    assert batches < sum(map(len, streams)) / 2
    for one, other in zip(made, expected, strict=True):
        assert [_facts(record) for record in one] == [_facts(record) for record in other]


@pytest.mark.parametrize(("bias", "resync"), [(0.4, 0), (0.0, 4)])
@pytest.mark.every(2)
def test_a_neighbour_with_a_larger_limit_changes_nothing(bias: float, resync: int) -> None:
    """Where the source shrinks, the last output may be longer than the next one can be."""
    cut = redrafted = 0
    for seed in range(12):
        target = a_target(seed % 10, ends=20)
        words = a_stream(seed)[-1][0]
        options = {"bias": bias, "resync": resync}
        alone, together = (a_translator(target, **options) for _ in range(2))
        for one in (alone, together):
            one.update(f"{words} {words}")
            one.config = LiveConfig(**options, max_ratio=0.2, max_extra=6 + seed % 10)
        expected = alone.begin(words, final=False)
        neighbour = a_translator(target, **options)
        found = together.begin(words, final=False)
        updates = [found, neighbour.begin(words, final=False)]
        list(together.engine.steps(updates, [together.session, neighbour.session]))
        list(alone.engine.steps([expected], [alone.session]))
        assert _untimed(found) == _untimed(expected)
        counts = expected.counts()
        assert counts["drafted"] == len(expected.draft) < expected.max_new_tokens
        cut += len(expected.draft) == expected.max_new_tokens - 1
        redrafted += counts["redrafted"]
    assert cut > 3 and (redrafted > 0) == (resync > 0)


@pytest.mark.parametrize(("bias", "resync"), [(0.3, 0), (0.0, 4)])
def test_one_row_without_copies_is_decoded_like_a_row_that_is_copied(
    target: HFTarget, bias: float, resync: int
) -> None:
    """Fast path and batch: the same output, counts and cached tokens, whichever came before."""
    options = {"bias": bias, "resync": resync, "max_extra": 12}
    reused = 0
    for seed in range(6):
        one, other, neighbour = (a_translator(target, **options) for _ in range(3))
        cache = None
        for turn, (source, final) in enumerate(a_stream(seed)):
            single, row = one.begin(source, final=final), other.begin(source, final=final)
            list(one.engine.steps([single], [one.session]))
            batch, sessions = [row], [other.session]
            if turn % 3 != 2:  # a single row reads the cache that a batch left, too
                batch.append(neighbour.begin(source, final=final))
                sessions.append(neighbour.session)
            list(other.engine.steps(batch, sessions))
            assert _untimed(single) == _untimed(row)
            assert one.session.tokens == other.session.tokens
            assert one.session.cache is not None and other.session.cache is not None
            lengths = [list(one.session.cache.lengths_B), list(other.session.cache.lengths_B)]
            assert lengths[0] == lengths[1] == [len(one.session.tokens[0])]
            assert cache in (None, one.session.cache), "the cache of a single row is not copied"
            cache, reused = one.session.cache, reused + single.reused
            records = one.finish(single), other.finish(row)
            assert _facts(records[0]) == _facts(records[1])
    assert reused


def test_a_row_is_cut_where_its_own_limit_lies() -> None:
    """A batch goes on to the largest limit: counts are those of a draft that ends before it."""
    row = InFlightUpdate(
        source="", final=False, prompt=(1,), draft=(2, 3), bias=0.0, max_new_tokens=5
    )

    def step(emitted: tuple[int, ...], origins: tuple[int, ...], offered: int) -> DecodeStep:
        return DecodeStep(
            emitted=(emitted,), origins=(origins,), offered_depth=(offered,), finish=(None,),
            accepted=(len(origins),), proposed=(offered,), prefill=False,
        )  # fmt: skip

    assert not row.add(step((2, 3, 4), (ALIGNED, ALIGNED), 2), 0, 1.0)
    assert row.add(step((5, 6, 7, 8), (1, 1, 1), 4), 0, 2.0)
    assert row.output(frozenset({4})) == (2, 3, 5, 6) and not row.ended
    assert list(row.counts().values())[:4] == [2, 2, 1, 1]


def _untimed(update: InFlightUpdate) -> InFlightUpdate:
    return replace(update, seconds=0.0, first_seconds=0.0)


def _alone(translator: LiveTranslator, stream: list[tuple[str, bool]]) -> list[UpdateRecord | None]:
    return [translator.update(source, final=final) for source, final in stream]


def _facts(record: UpdateRecord | None) -> UpdateRecord | None:
    """Without times."""
    return record and replace(record, seconds=0.0, first_seconds=0.0)
