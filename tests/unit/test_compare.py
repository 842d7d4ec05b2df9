"""Many runs side by side: pooling, ranking, names, gains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.small_study import GREEDY_LANGUAGES, a_run, only_scope, the_comparison

from draftsmith.bench.compare.model import RunMetrics, compare, pool
from draftsmith.bench.compare.page import csv_table, render, sentences, summary
from draftsmith.errors import InputError

# --------------------------------------------------------------------------- pooling


def test_the_interval_is_students_and_covers_as_often_as_it_says() -> None:
    """2,000 intervals from three seeds: 95 % cover; 93.5 to 96.5 % is three deviations."""
    rng = np.random.default_rng(0)
    hits = 0
    for values in rng.normal(3.0, 0.2, size=(2000, 3)):
        pooled = pool(values.tolist())
        assert pooled.half is not None
        hits += abs(pooled.mean - 3.0) <= pooled.half
    assert 0.935 < hits / 2000 < 0.965
    found = pool([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, loc=7 / 3, scale=stats.sem([1.0, 2.0, 4.0]))
    assert found.half == pytest.approx((high - low) / 2)
    assert pool([2.0]).half is None


def test_seeds_of_one_setting_are_pooled_and_settings_are_not() -> None:
    scope = only_scope(
        [a_run("a", seed=0, tau=3.0), a_run("b", seed=1, tau=4.0), a_run("c", beams=8, tau=3.2)]
    )
    assert [(e.rank, e.seeds, e.value("tau")) for e in scope.entries] == [(1, 2, 3.5), (2, 1, 3.2)]
    assert [e.name for e in scope.entries] == ["forward KL, 4 beams", "forward KL, 8 beams"]


def test_two_runs_of_one_seed_are_not_two_seeds() -> None:
    comparison = compare([a_run("a", tau=3.0), a_run("b", tau=4.0), a_run("c", seed=1, tau=3.5)])
    (scope,) = comparison.scopes
    assert [(e.seeds, e.name) for e in scope.entries] == [
        (1, "forward KL (b)"),
        (1, "forward KL (c)"),
        (1, "forward KL (a)"),
    ]
    (note,) = comparison.notes
    assert note.startswith("a, b, c: same setting and seed, so they are not pooled")
    assert "figures that show one factor leave them out" in note


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'a' is there twice"):
        compare([a_run("a"), a_run("a")])
    compare([a_run("a"), a_run("a", seed=1), a_run("a", language="French")])


def test_runs_that_were_measured_otherwise_are_not_ranked_together() -> None:
    runs = [
        a_run("a", decoding_temperature=0.0, target="t", tau=3.0),
        a_run("a", decoding_temperature=1.0, target="t", tau=2.0),
        a_run("a", decoding_temperature=1.0, target="u", tau=1.5),
        a_run("b", decoding_temperature=1.0, target="t", tau=2.5, objective="rkl"),
    ]
    comparison = compare(runs)
    assert [scope.title for scope in comparison.scopes] == [
        "t, decoding temperature 0",
        "t, decoding temperature 1",
        "u, decoding temperature 1",
    ]
    assert [len(scope.entries) for scope in comparison.scopes] == [1, 2, 1]
    assert comparison.main is comparison.scopes[1]
    assert all(scope.entries[0].rank == 1 for scope in comparison.scopes)


def test_measured_tokens_per_step_rank_before_predicted_and_those_before_acceptance() -> None:
    runs = [
        a_run("a", objective="kl", tau=3.0, tau_predicted=9.0, alpha=0.9),
        a_run("b", objective="rkl", tau=4.0, tau_predicted=1.0, alpha=0.1),
        a_run("c", objective="jsd", tau=None, tau_predicted=5.0, alpha=0.95),
    ]
    order = {
        "tau": ["reverse KL", "forward KL", "JSD"],
        "tau_predicted": ["forward KL", "JSD", "reverse KL"],
        "alpha": ["JSD", "forward KL", "reverse KL"],
    }
    for measure, names in order.items():
        scope = only_scope(runs)
        assert scope.ranked_by == measure
        assert [entry.name for entry in scope.entries] == names
        runs = [
            replace(run, tau=None, tau_predicted=None)
            if measure == "tau_predicted"
            else replace(run, tau=None)
            for run in runs
        ]
    assert only_scope([a_run("a"), a_run("b", objective="rkl", tau=None)]).entries[1].rank is None


def test_without_a_figure_over_all_the_mean_of_the_languages_stands_in() -> None:
    parts = [a_run("a", language=name, tau=tau) for name, tau in (("fr", 2.0), ("Korean", 5.0))]
    entry = only_scope(parts).entries[0]
    assert entry.value("tau") == 3.5
    assert {name: p.mean for name, p in entry.by_language.items()} == {"French": 2.0, "Korean": 5.0}
    # a mean over fewer languages is no mean over all, and a whole run needs no stand-in
    halved = [replace(parts[0], alpha=0.5), parts[1]]
    assert only_scope(halved).entries[0].value("alpha") is None
    assert only_scope([*parts, a_run("a", tau=3.0)]).entries[0].value("tau") == 3.0


def test_names_say_what_differs_and_nothing_else() -> None:
    scope = only_scope(
        [
            a_run("a", forcing="sample", beams=1),
            a_run("b", forcing="beam", beams=1),
            a_run("c", forcing="beam", beams=8),
            a_run("g", forcing="sample", beams=8),
            a_run("d", teacher_temperature=0.7),
            a_run("e", objective="own", truncation="full"),
            RunMetrics(label="f", tau=1.0),
        ]
    )
    assert sorted(e.name for e in scope.entries) == [
        "f",
        "forward KL, 1 beam",
        "forward KL, 4 beams, T=0.7",
        "forward KL, 8 beams",
        "forward KL, 8 draws",
        "forward KL, sample",
        "own, 4 beams, full",
    ]


def test_every_setting_of_a_study_has_its_own_name() -> None:
    names = Counter(entry.name for entry in the_comparison().main.entries)
    assert names.most_common(1)[0][1] == 1
    # where a factor is unknown for some, silence cannot mean the usual value
    runs = [a_run("a"), a_run("b", teacher_temperature=None), a_run("c", teacher_temperature=2.0)]
    assert len({entry.name for entry in only_scope(runs).entries}) == 3


# --------------------------------------------------------------------------- gains


def test_gains_are_against_the_undistilled_draft_per_language() -> None:
    scope = the_comparison().main
    assert scope.base is not None and scope.base.name == "no distillation"
    assert scope.top is not None and scope.top.name == "TVD, 8 beams"
    gains = {gain.name: gain for gain in scope.gains()}
    assert set(gains) == set(GREEDY_LANGUAGES)
    tau = 3.0 + 0.15 + 0.3 + 0.005
    assert gains["Korean"].base == pytest.approx(2.625)
    assert gains["Korean"].best_value == pytest.approx(1.1 * tau)
    assert gains["Korean"].best_gain == pytest.approx(1.1 * tau / 2.625 - 1)
    assert gains["Korean"].top_gain == gains["Korean"].best_gain
    order = [gain.best_gain for gain in scope.gains()]
    assert order == sorted(order, reverse=True)


def test_the_best_of_a_language_need_not_be_the_best_of_all() -> None:
    runs = [a_run("base", objective="none", language=n, tau=2.0) for n in ("French", "Korean")]
    runs += [a_run("a", objective="kl", language=n, tau=t) for n, t in (("fr", 4.0), ("ko", 2.2))]
    runs += [a_run("b", objective="rkl", language=n, tau=t) for n, t in (("fr", 2.4), ("ko", 3.0))]
    korean = next(gain for gain in only_scope(runs).gains() if gain.name == "Korean")
    assert korean.best == "reverse KL"
    assert (korean.best_gain, korean.top_gain) == (pytest.approx(0.5), pytest.approx(0.1))


def test_settings_of_one_name_have_gains_of_their_own() -> None:
    """That one beam was asked for, and that nobody says how many, read alike."""
    how: dict[str, Any] = {"language": "ko", "forcing": "greedy"}
    runs = [a_run("base", objective="none", tau=2.0, beams=None, **how)]
    runs += [a_run("a", beams=1, tau=4.0, **how), a_run("b", beams=None, tau=2.4, **how)]
    scope = only_scope([*runs, *(replace(run, language=None) for run in runs)])
    names = [entry.name for entry in scope.entries]
    assert len(set(names)) < len(names) == 3
    (korean,) = scope.gains()
    assert (korean.best_value, korean.top_value) == (pytest.approx(4.0), pytest.approx(4.0))


def test_a_base_can_be_named() -> None:
    runs = [a_run("plain", objective=None, tau=2.0), a_run("b", tau=3.0)]
    assert only_scope(runs).base is None
    scope = only_scope(runs, base="plain")
    assert scope.base is not None and scope.base.value("tau") == 2.0
    with pytest.raises(InputError, match="'plane'; did you mean 'plain'"):
        compare(runs, base="plane")


def test_an_undistilled_draft_that_ranks_first_is_no_winner_and_two_of_them_are_no_base() -> None:
    better = a_run("base", objective="none", tau=5.0)
    scope = only_scope([a_run("a"), better])
    assert scope.entries[0] is scope.base
    assert scope.top is scope.entries[1]
    assert only_scope([a_run("a"), better, replace(better, label="other")]).base is None


def test_the_first_is_praised_with_its_gain_and_doubted_within_the_noise() -> None:
    runs = [a_run(f"k{s}", seed=s, tau=3.0 + 0.1 * s) for s in range(3)]
    runs += [a_run(f"r{s}", objective="rkl", seed=s, tau=3.05 + 0.1 * s) for s in range(3)]
    runs += [a_run("base", objective="none", tau=2.1)]
    first, doubt = sentences(compare(runs))
    assert first == (
        "reverse KL ranks first of 3: 3.15 tokens per step, +50.0 % against the undistilled "
        "draft's 2.10."
    )
    assert "lead over forward KL lies within the intervals" in doubt
    looping = [replace(r, decoding_temperature=0.0, loop_share=0.63) for r in runs]
    assert "63 % of its tokens in repetition loops" in sentences(compare(looping))[0]
    far = [replace(r, tau=r.tau + 2) if r.objective == "rkl" and r.tau else r for r in runs]
    assert len(sentences(compare(far))) == 1


def test_rejections_saved_compare_acceptances_of_one_kind_with_the_undistilled_draft() -> None:
    base = a_run("base", objective="none", alpha=0.728, alpha_decoded=0.5)
    runs = [
        a_run("a", tau=3.9, alpha=0.778, alpha_decoded=0.9),
        a_run("b", beams=8, tau=3.5, alpha_decoded=0.9),  # expected acceptance is not known
        replace(base, tau=2.0),
    ]
    scope = only_scope(runs)
    saved = [scope.rejections_saved(entry) for entry in scope.entries]
    assert saved == [pytest.approx(0.1838, abs=1e-4), None, None]
    decoded = only_scope([replace(run, alpha=None) for run in runs])
    assert decoded.rejections_saved(decoded.entries[1]) == pytest.approx(0.8)
    assert (
        only_scope(runs[:2]).rejections_saved(scope.entries[0]) is None
    )  # nothing to compare with
    comparison = compare(runs)
    assert "18.4 % of the refused drafts" in sentences(comparison)[0]
    assert "18.4 %" in render(comparison, (), ())
    found = summary(comparison, ())["scopes"][0]["settings"]
    assert [one["rejections_saved"] for one in found] == saved
    assert csv_table(comparison).splitlines()[0].count("rejections_saved") == 1


def test_runs_that_counted_the_prompts_step_rank_behind_those_that_did_not() -> None:
    old = a_run("old", beams=2, tau=None, tau_with_prefill=9.0)
    scope = only_scope([old, a_run("new", tau=2.0, tau_with_prefill=1.9)])
    assert [(e.rank, e.value("tau")) for e in scope.entries] == [(1, 2.0), (None, None)]
    assert only_scope([old]).ranked_by == "tau_with_prefill"
