"""The measurement itself: order, completeness, what the records hold. No test looks at a time."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch
from tests.forks import Forks
from tests.tiny_models import tiny_model, tiny_tokenizer

from draftsmith.bench import arms
from draftsmith.bench import records as records_module
from draftsmith.bench.arms import supports, time_decode, time_generate
from draftsmith.bench.loops import StepCounts, in_loops
from draftsmith.bench.records import BASELINE, TRANSFORMERS, RunRecord, drafter_metrics
from draftsmith.bench.run import Bench, BenchPlan, Item
from draftsmith.core.decode import DecodeOptions
from draftsmith.core.generation import Arm, generate
from draftsmith.core.sampling import Sampler
from draftsmith.core.transfer import no_garbage_collection
from draftsmith.core.types import LengthPolicy, RowStats, StepCount, TreeShape
from draftsmith.drafters.cascade import Cascade
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.prompt_lookup import PromptLookup
from draftsmith.drafters.suffix import Suffix
from draftsmith.errors import InputError
from draftsmith.provenance import append_jsonl, write_json_atomic
from draftsmith.targets.hf import HFTarget
from draftsmith.targets.toy import TabularTarget, tiny_target

SAMPLERS = (Sampler(), Sampler(temperature=0.8))


def make_plan(target: HFTarget, **changes: object) -> BenchPlan:
    lookup, draft = (
        PromptLookup(),
        Independent(Independent.Config(), model=tiny_target(300, seed=3)),
    )
    for drafter in (lookup, draft):
        drafter.bind(target)
    plan = BenchPlan(
        target=target,
        arms=(
            Arm(name=BASELINE, drafter=NoDrafter()),
            Arm(name="prompt_lookup", drafter=lookup),
            Arm(name="independent:x", drafter=draft, shape=TreeShape.chain(3)),
        ),
        items=tuple(
            Item(prompt=str(i), tokens=(7 + i, 8, 9, 7 + i, 8), tag="ab"[i % 2]) for i in range(3)
        ),
        samplers=SAMPLERS,
        max_new_tokens=12,
        repeats=2,
        cost_rounds=2,
    )
    return replace(plan, **changes)


def a_target() -> HFTarget:
    return HFTarget(tiny_model().double(), tiny_tokenizer(), end_ids=frozenset({0}))


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return a_target()


@pytest.fixture(scope="module")
def measured(target: HFTarget) -> tuple[RunRecord, ...]:
    bench = Bench(make_plan(target))
    bench.prepare()
    return tuple(record for lines in bench.records() for record in lines)


def test_one_record_per_prompt_drafter_temperature_and_repeat(
    target: HFTarget, measured: tuple[RunRecord, ...]
) -> None:
    keys = Counter((r.prompt, r.drafter, r.temperature, r.repeat) for r in measured)
    assert set(keys.values()) == {1}
    assert len(keys) == 3 * 4 * 2 * 2 == make_plan(target).num_records


def test_rounds_interleave_and_rotate_all_arms(target: HFTarget) -> None:
    plan = make_plan(target, repeats=4)
    rounds = list(Bench(plan).rounds())
    names = {*(arm.name for arm in plan.arms), TRANSFORMERS}
    assert all(set(entry.order) == names for entry in rounds)
    assert all(a.order != b.order for a, b in itertools.pairwise(rounds))
    first = Counter(entry.order[0] for entry in rounds)
    assert max(first.values()) - min(first.values()) <= 1
    # repeats outermost: an interrupted run has seen every prompt before it sees one again
    assert [entry.repeat for entry in rounds] == sorted(entry.repeat for entry in rounds)


class Remembering(LengthPolicy):
    """One token, and how many texts it knew at the first step of each."""

    max_length = 1

    def __init__(self, begun: list[int]) -> None:
        self.texts, self.begun = 0, begun

    def length(self, stats: RowStats) -> int:
        if not stats.steps:
            self.begun.append(self.texts)
        return 1

    def learn(self, rows: Sequence[Sequence[StepCount]]) -> None:
        self.texts += len(rows)


def test_what_a_policy_learns_stays_within_a_repeat_and_temperature(target: HFTarget) -> None:
    """In particular it knows nothing of the warm-up, which drew the same texts."""
    begun: list[int] = []
    plan = make_plan(target, with_transformers=False)
    arms = (*plan.arms[:2], replace(plan.arms[2], policy=Remembering(begun)))
    bench = Bench(replace(plan, arms=arms))
    bench.prepare()
    list(bench.records())
    assert begun == [0, 0] + [0, 1, 2] * 4  # a warm-up per temperature, then three prompts


def test_records_say_what_lies_in_loops_and_what_was_drafted_outside(
    target: HFTarget, measured: tuple[RunRecord, ...]
) -> None:
    greedy = [r for r in measured if r.temperature == 0]
    assert {r.drafter for r in greedy if r.outside_loops is None} == {TRANSFORMERS}
    plan, found = make_plan(target), []
    for item in plan.items:
        mine = [r for r in greedy if r.prompt == item.prompt]
        options = plan.decode_options(Sampler(), plan.seed)
        (made,) = generate(target, NoDrafter(), [item.tokens], options)
        looped = in_loops(made.token_ids)
        assert {r.loop_tokens for r in mine} == {looped.sum()}  # of one text, whoever drafted
        outside = int((~looped[1:]).sum())
        assert {r.outside_loops for r in mine if r.drafter == BASELINE} == {
            StepCounts(steps=outside, tokens=outside, accepted=0, offered=0)
        }
        found.append(looped.any())
        for record in mine:
            if record.outside_loops is not None:
                seconds = record.seconds_outside_loops
                assert seconds is not None and 0 < seconds <= record.decode_seconds
                if looped[1:].any():
                    assert seconds < record.decode_seconds
    assert any(found)


def test_places_say_when_an_arm_ran(measured: tuple[RunRecord, ...]) -> None:
    for key in {(r.group, r.temperature, r.repeat) for r in measured}:
        places = [r.place for r in measured if (r.group, r.temperature, r.repeat) == key]
        assert sorted(places) == [0, 1, 2, 3]


def test_seconds_of_a_run_add_up(measured: tuple[RunRecord, ...]) -> None:
    for record in measured:
        assert record.seconds == pytest.approx(record.prefill_seconds + record.decode_seconds)
        assert record.prefill_seconds > 0
        if record.phases is not None:
            assert sum(astuple(record.phases)) == pytest.approx(record.decode_seconds, abs=1e-6)
        else:
            assert record.drafter == TRANSFORMERS


def test_counts_are_of_emitted_tokens(measured: tuple[RunRecord, ...]) -> None:
    for record in measured:
        if record.drafter == BASELINE:
            assert record.steps == record.tokens
        if record.steps is not None and record.accepted is not None:
            assert record.tokens <= record.accepted + record.steps
            assert record.decode_steps == record.steps - 1
        assert record.tokens <= 12
        assert record.decode_tokens < record.tokens


def test_greedy_texts_are_plain_decodings_in_float64(measured: tuple[RunRecord, ...]) -> None:
    greedy = [r for r in measured if r.temperature == 0]
    assert all(r.identical and r.divergence is None for r in greedy)
    assert len({r.digest for r in greedy}) == 3
    floors = [r.floor for r in greedy if r.floor is not None]
    assert len(floors) == 3  # plain decoding's lines of the first repeat
    assert all(floor.flips == 0 for floor in floors)


def test_above_temperature_0_nothing_is_claimed(measured: tuple[RunRecord, ...]) -> None:
    warm = [r for r in measured if r.temperature > 0]
    assert all(r.identical is None and r.divergence is None and r.floor is None for r in warm)
    texts = {(r.drafter, r.prompt): set() for r in warm if r.drafter != TRANSFORMERS}
    for r in warm:
        if r.drafter != TRANSFORMERS:
            texts[r.drafter, r.prompt].add(r.digest)
    # repeats have seeds of their own
    assert any(len(digests) == 2 for digests in texts.values())


def test_texts_with_origins_are_kept_once(measured: tuple[RunRecord, ...]) -> None:
    for record in measured:
        assert (record.pieces is not None) == (record.repeat == 0)
    drafted = [
        any(piece.drafted for piece in record.pieces or ())
        for record in measured
        if record.drafter == "independent:x" and record.repeat == 0 and record.accepted
    ]
    assert drafted
    assert all(drafted)
    plain = next(r for r in measured if r.drafter == BASELINE and r.pieces)
    assert not any(piece.drafted for piece in plain.pieces or ())


def test_records_of_a_cascade_count_by_source(target: HFTarget, tmp_path: Path) -> None:
    cascade = Cascade([Suffix(), Independent(Independent.Config(), model=a_target())])
    cascade.bind(target)
    arms = (Arm(name=BASELINE, drafter=NoDrafter()), Arm(name="joined", drafter=cascade))
    bench = Bench(make_plan(target, arms=arms, samplers=SAMPLERS[:1], repeats=1))
    bench.prepare()
    found = tuple(record for lines in bench.records() for record in lines)
    for record in found:
        if record.drafter != "joined":
            assert record.by_source is None
            continue
        assert record.by_source is not None and record.by_origin is not None
        assert list(record.by_source) == ["Suffix", "Independent"]
        assert record.by_source["Suffix"] == record.by_origin.get("0", 0)
        assert record.by_source["Independent"] == record.by_origin.get("2", 0) > 0
    append_jsonl(tmp_path / "records.jsonl", *found)
    assert records_module.read(tmp_path / "records.jsonl") == found


def test_records_survive_the_file(measured: tuple[RunRecord, ...], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    append_jsonl(path, *measured[:5])
    append_jsonl(path, *measured[5:])
    assert records_module.read(path) == measured
    assert drafter_metrics(records_module.read(path)) == drafter_metrics(measured)


@pytest.mark.parametrize("other", [None, "b"])
def test_records_of_several_runs_are_refused(
    measured: tuple[RunRecord, ...], tmp_path: Path, other: str | None
) -> None:
    path = tmp_path / "records.jsonl"
    own = [replace(record, run="a") for record in measured[:3]]
    append_jsonl(path, *own)
    for name in ("run.json", "summary.json"):
        write_json_atomic(path.with_name(name), {"id": "a", "run": "a"})
    assert records_module.read(path) == tuple(own)
    append_jsonl(path, replace(measured[3], run=other))
    with pytest.raises(InputError, match=rf"records\.jsonl.*3 .*\ba\b.*1 .*{other or 'unknown'}"):
        records_module.read(path)


@pytest.mark.parametrize(("name", "key"), [("run.json", "id"), ("summary.json", "run")])
@pytest.mark.parametrize("run", ["a", None])
def test_records_beside_what_another_run_says_of_itself_are_refused(
    measured: tuple[RunRecord, ...], tmp_path: Path, name: str, key: str, run: str | None
) -> None:
    path = tmp_path / "records.jsonl"
    append_jsonl(path, replace(measured[0], run=run))
    write_json_atomic(tmp_path / name, {"verb": "bench"})
    assert records_module.read(path)[0].run == run  # an earlier version wrote no id
    write_json_atomic(tmp_path / name, {key: "c"})
    with pytest.raises(InputError, match=rf"records\.jsonl.*{name} .*\bc\b"):
        records_module.read(path)


def test_all_records_of_a_plan_carry_its_run(target: HFTarget) -> None:
    bench = Bench(make_plan(target, samplers=(Sampler(),), repeats=1, run="a"))
    bench.prepare()
    assert {record.run for lines in bench.records() for record in lines} == {"a"}


def test_a_damaged_line_is_named(measured: tuple[RunRecord, ...], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_jsonl(path, *measured[:1])
    whole = path.read_text()
    path.write_text(whole + '{"prompt": 1}\n')
    with pytest.raises(InputError, match=r"records\.jsonl, line 2"):
        records_module.read(path)
    path.write_text(whole + whole[:40])
    with pytest.raises(InputError, match="line 2: not JSON"):
        records_module.read(path)
    with pytest.raises(InputError, match="cannot read"):
        records_module.read(tmp_path / "none.jsonl")


def test_prompts_decoded_together_share_seconds_and_keep_their_texts(target: HFTarget) -> None:
    alone = Bench(make_plan(target, samplers=(Sampler(),), repeats=1))
    groups = Bench(make_plan(target, samplers=(Sampler(),), repeats=1, batch_size=2))
    assert [list(rows) for rows in groups.plan.groups] == [[0, 1], [2]]
    one = {(r.prompt, r.drafter): r for lines in alone.records() for r in lines}
    for bench_lines in groups.records():
        for record in bench_lines:
            assert record.digest == one[record.prompt, record.drafter].digest
            assert record.tokens == one[record.prompt, record.drafter].tokens
            shared = [
                r for r in bench_lines if (r.drafter, r.group) == (record.drafter, record.group)
            ]
            assert len({r.seconds for r in shared}) == 1


def test_transformers_stays_out_where_it_has_no_such_law(target: HFTarget) -> None:
    odd = Sampler(temperature=0.8, presence_penalty=0.5)
    assert not supports(odd)
    assert TRANSFORMERS not in make_plan(target, samplers=(odd,)).arm_names(odd)
    assert TRANSFORMERS not in make_plan(target, with_transformers=False).arm_names(Sampler())


def test_transformers_runs_on_the_same_weights_and_gives_them_back(target: HFTarget) -> None:
    before = target.model.config._attn_implementation
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5)]
    ours = generate(target, NoDrafter(), prompts, DecodeOptions(max_new_tokens=10))
    theirs = time_generate(target, prompts, Sampler(), 10, 0)
    assert theirs.tokens == tuple(made.token_ids for made in ours)
    assert theirs.finish == tuple(made.finish_reason for made in ours)
    assert target.model.config._attn_implementation == before
    assert 0 < theirs.prefill_seconds < theirs.seconds


def test_transformers_draws_without_touching_the_global_noise(target: HFTarget) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    warm = Sampler(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01)
    first = time_generate(target, [(5, 6, 7)], warm, 10, seed=1)
    again = time_generate(target, [(5, 6, 7)], warm, 10, seed=1)
    assert first.tokens == again.tokens
    assert torch.rand(3).equal(expected)


def test_transformers_stops_at_the_context() -> None:
    small = HFTarget(tiny_model(context=24), tiny_tokenizer(), end_ids=frozenset())
    found = time_generate(small, [tuple(range(1, 21))], Sampler(), 50, 0)
    assert len(found.tokens[0]) == 4
    assert found.finish == ("context",)


def test_a_timed_run_tells_widths_of_the_decoding_phase() -> None:
    table = TabularTarget(8)
    drafter = Independent(Independent.Config(), model=TabularTarget(8, seed=1))
    drafter.bind(table)
    arm = Arm(name="d", drafter=drafter, shape=TreeShape.chain(4))
    run = time_decode(table, arm, [(1, 2, 3)], DecodeOptions(max_new_tokens=30), [0])
    assert run.decode_steps == (len(run.widths),)
    # full drafts, shorter ones where the room ends
    assert run.widths[0] == 5
    assert list(run.widths) == sorted(run.widths, reverse=True)
    assert sum(run.decode_tokens) + 1 <= 30


def test_seconds_outside_of_loops_are_those_of_the_steps_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The n-th step takes 2 ** n, so that a sum names its steps."""
    table = TabularTarget(8)  # one token follows each pair: it repeats itself in the end
    arm = Arm(name="none", drafter=NoDrafter())
    looks = itertools.count()
    monkeypatch.setattr(arms, "now", lambda device: 2.0 ** next(looks))
    run = time_decode(table, arm, [(1, 2, 3)], DecodeOptions(max_new_tokens=40), [0])
    looped = in_loops(run.tokens[0])
    steps = [n for n in range(1, len(looped)) if not looped[n]]
    assert steps and looped[1:].any()
    assert run.seconds_outside_loops == sum(2.0**n for n in steps)
    together = time_decode(table, arm, [(1, 2, 3), (3, 2)], DecodeOptions(max_new_tokens=9), [0, 1])
    assert together.seconds_outside_loops is None


def test_nothing_is_collected_inside_a_timed_run() -> None:
    assert gc.isenabled()
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="stop"), no_garbage_collection():
        raise ValueError("stop")
    assert gc.isenabled()


def freeze_and_thaw() -> None:
    """In a process that has frozen nothing itself."""
    gc.unfreeze()
    run = Bench(make_plan(a_target(), samplers=(Sampler(),), repeats=1))
    run.prepare()
    assert gc.get_freeze_count() == 0
    for _ in run.records():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
    with no_garbage_collection():
        assert gc.get_freeze_count() > 1000
        with no_garbage_collection():
            pass
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.full
def test_what_is_loaded_is_left_out_inside_and_counts_again_outside(forks: Forks) -> None:
    with forks.start(freeze_and_thaw) as child:
        assert child.wait() == 0, child.errors()
