"""What is written: summary.json as promised, a page that needs nothing else, honest sentences."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.measurements import a_record
from tests.pages import Collector

from draftsmith.bench import summary as page_module
from draftsmith.bench.loops import StepCounts
from draftsmith.bench.plots import draw_plots
from draftsmith.bench.records import (
    BASELINE,
    TRANSFORMERS,
    CostSeconds,
    FirstDivergence,
    Floor,
    PhaseSeconds,
    RunRecord,
)
from draftsmith.bench.summary import (
    BenchReport,
    losslessness_sentences,
    prompt_sentences,
    render,
    rows,
    samples,
    source_sentences,
    speed_sentences,
    summary,
    tag_table,
    terminal_table,
    write_report,
)
from draftsmith.core.generation import Piece
from draftsmith.plots import PlotImage

LOOPED = StepCounts(steps=10, tokens=15, accepted=5, offered=20)
PROMISED = {
    "name",
    "temperature",
    "tokens_per_step",
    "acceptance_rate",
    "acceptance_by_position",
    "speedup",
    "speedup_ci95",
    "predicted_speedup",
    "engine_efficiency",
    "identical_to_autoregressive",
    "largest_gap_at_divergence",
}


def measured(drafter: str, prompt: int, temperature: float, repeat: int) -> RunRecord:
    greedy = temperature == 0
    plain, rival = drafter == BASELINE, drafter == TRANSFORMERS
    seconds = {BASELINE: 2.0, TRANSFORMERS: 3.0}.get(drafter, 1.0 + 0.1 * prompt + 0.01 * repeat)
    phases = PhaseSeconds(draft=0.1, target=seconds - 0.3, verify=0.1, other=0.1)
    return a_record(
        drafter,
        prompt,
        tag="ab"[prompt % 2],
        temperature=temperature,
        repeat=repeat,
        seed=repeat,
        tokens=40,
        steps=None if rival else 40 if plain else 20,
        decode_steps=None if rival else 39 if plain else 19,
        accepted=None if rival else 0 if plain else 20,
        offered=None if rival else 0 if plain else 60,
        proposed=None if rival else 0 if plain else 60,
        by_position=() if plain or rival else ((20, 14), (14, 5), (5, 1)),
        seconds=seconds,
        phases=None if rival else phases,
        costs=None if rival else CostSeconds(baseline=2.0, draft=0.0, target=seconds),
        identical=True if greedy else None,
        floor=Floor(tokens=100, flips=0, largest_gap=None)
        if greedy and plain and not repeat
        else None,
        prompt_tail="<script>alert(1)</script> & def f(x):" if repeat == 0 else None,
        pieces=(Piece(text=" return", drafted=True), Piece(text=" x < 1 && y", drafted=False))
        if repeat == 0
        else None,
    )


def a_report(*, dtype: str = "float32") -> BenchReport:
    records = tuple(
        measured(drafter, prompt, temperature, repeat)
        for repeat in range(2)
        for temperature in (0.0, 0.8)
        for prompt in range(4)
        for drafter in (BASELINE, "prompt_lookup", "independent:models/x/draft", TRANSFORMERS)
    )
    return BenchReport(
        target="models/x/target",
        dtype=dtype,
        records=records,
        command="draftsmith bench --target models/x/target",
        versions={"python": "3.11", "torch": "2.13"},
        machine={"cpu": "some cpu", "cpus": 2},
        max_new_tokens=40,
    )


def with_divergence(
    report: BenchReport, divergence: FirstDivergence, *, floor_flips: int = 3
) -> BenchReport:
    """prompt_lookup differs on one prompt; the target differs from itself now and then."""

    def change(record: RunRecord) -> RunRecord:
        if record.temperature != 0:
            return record
        if record.drafter == "prompt_lookup" and record.prompt == "p1":
            return replace(record, identical=False, divergence=divergence)
        if record.floor is not None:
            return replace(record, floor=Floor(tokens=40, flips=floor_flips, largest_gap=0.2))
        return record

    return replace(report, records=tuple(map(change, report.records)))


def test_summary_has_the_promised_fields() -> None:
    found = summary(a_report())
    assert {"target", "drafters", "dtype", "versions", "machine"} <= set(found)
    assert [(e["name"], e["temperature"]) for e in found["drafters"]] == [
        (name, temperature)
        for name in (BASELINE, "prompt_lookup", "independent:models/x/draft")
        for temperature in (0.0, 0.8)
    ]
    assert all(set(entry) >= PROMISED for entry in found["drafters"])
    entry = found["drafters"][2]
    assert entry["tokens_per_step"] == 2.0
    assert entry["acceptance_rate"] == pytest.approx(1 / 3)
    assert entry["acceptance_by_position"] == pytest.approx([0.7, 5 / 14, 0.2])
    low, high = entry["speedup_ci95"]
    assert low <= entry["speedup"] <= high
    assert entry["identical_to_autoregressive"] is True
    assert entry["largest_gap_at_divergence"] is None
    baseline = found["drafters"][0]
    assert baseline["acceptance_rate"] is None
    assert baseline["acceptance_by_position"] is None
    warm = found["drafters"][3]
    assert warm["identical_to_autoregressive"] is None
    assert [entry["temperature"] for entry in found["transformers"]] == [0.0, 0.8]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_figure_comes_from_the_records_alone() -> None:
    """Costs on the report are for showing: predictions are in the records already."""
    assert summary(a_report())["drafters"][2]["predicted_speedup"] == pytest.approx(
        8 * 2.0 / sum(1.0 + 0.1 * p + 0.01 * r for p in range(4) for r in range(2))
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report."""
    folder = tmp_path_factory.mktemp("report")
    write_report(a_report(), folder)
    return folder


@pytest.fixture(scope="module")
def drawn() -> tuple[PlotImage, ...]:
    return tuple(draw_plots(a_report()))


def test_the_page_needs_nothing_but_itself(written: Path) -> None:
    page = (written / "report.html").read_text(encoding="utf-8")
    collected = Collector()
    collected.feed(page)
    assert "http:" not in page
    assert "https:" not in page
    assert "@import" not in page
    assert all(link.startswith("#") for link in collected.links)
    assert not collected.tags & {"script", "link", "iframe", "img", "object"}
    assert "svg" in collected.tags
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    assert "#010203" not in page  # the stand-in ink


def test_pages_share_their_style_and_repeat_nothing_of_it() -> None:
    folder = Path(page_module.__file__).parent / "templates"
    style = (folder / "style.css.j2").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("body {") for line in style)
    pages = sorted(folder.glob("*.html.j2"))
    assert len(pages) == 2
    own = [set(path.read_text(encoding="utf-8").splitlines()) for path in pages]
    for lines in own:
        assert "{% include 'style.css.j2' +%}" in lines
        assert not lines & {line for line in style if "{" in line}
    rules = [{line for line in lines if re.match(r"[^{]+ \{ .*; \}$", line)} for lines in own]
    assert all(rules) and not rules[0] & rules[1]
    assert set(style[1:]) <= set(render(a_report(), ()).splitlines())


def test_the_page_says_what_was_measured_and_escapes_texts(drawn: tuple[PlotImage, ...]) -> None:
    report = a_report()
    page = render(report, drawn)
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; def f(x):" in page
    assert '<span class="drafted"> return</span> x &lt; 1 &amp;&amp; y' in page
    assert "draftsmith bench --target models/x/target" in page
    assert "some cpu" in page
    for sentence in speed_sentences(report):
        assert sentence in page
    for word in ("speed-up", "tokens per step", "accepted", "efficiency", "same tokens"):
        assert f"<dt>{word}</dt>" in page


def test_figures_are_written_whole_beside_the_page(written: Path) -> None:
    names = {path.name for path in (written / "figures").iterdir()}
    stems = {"speedup", "tokens_per_step", "acceptance_by_position", "time_breakdown"}
    assert names == {
        f"{stem}{s}" for stem in (*stems, "predicted_measured") for s in (".png", ".svg")
    }
    assert {path.name for path in written.iterdir()} == {"figures", "report.html", "summary.json"}
    assert (written / "figures/speedup.png").read_bytes().startswith(b"\x89PNG")
    svg = (written / "figures/speedup.svg").read_text()
    assert "#010203" not in svg
    assert "<svg" in svg


def test_near_ties_are_drawn_only_when_there_are_some(
    drawn: tuple[PlotImage, ...],
) -> None:
    plain = [picture.name for picture in drawn]
    assert "divergence_gaps" not in plain
    report = with_divergence(a_report(), FirstDivergence(at=5, gap=0.1, bound=0.5))
    assert "divergence_gaps" in [picture.name for picture in draw_plots(report)]


def test_drawing_twice_gives_the_same_files(drawn: tuple[PlotImage, ...]) -> None:
    first, second = drawn, draw_plots(a_report())
    assert [p.file_svg for p in first] == [p.file_svg for p in second]
    assert [re.sub(r"\s", "", p.page_svg) for p in first] == [
        re.sub(r"\s", "", p.page_svg) for p in second
    ]


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(terminal_table(a_report()))
    text = console.export_text()
    assert "prompt_lookup" in text
    assert "temperature 0.8" in text
    assert text.count("\N{HORIZONTAL ELLIPSIS}") == 0
    assert re.search(r"prompt_lookup +\d\.\d\dx +\d\.\d\d-\d\.\d\d", text)


def test_same_output_is_claimed_for_the_tokens_compared_and_no_more() -> None:
    (said, law) = losslessness_sentences(a_report())
    assert said == (
        "At temperature 0 the output of every drafter was identical to plain decoding (160 tokens)."
    )
    assert "law" in law


def test_half_precision_never_claims_bit_equality() -> None:
    said = " ".join(losslessness_sentences(a_report(dtype="bfloat16")))
    assert "In bfloat16 no engine can promise equal tokens" in said


def test_an_engine_that_is_exact_in_every_width_says_so() -> None:
    report = replace(a_report(dtype="bfloat16"), engine="compiled (avx2)", exact=True)
    said = " ".join(losslessness_sentences(report))
    assert "The engine (compiled (avx2)) computes equal logits, bit for bit" in said
    assert "no engine can promise" not in said


def test_transformers_beside_a_quantised_target_is_said_to_compute_in_another_format() -> None:
    said = "Transformers computes with the weights unquantised"
    assert not any(said in one for one in speed_sentences(a_report()))
    report = replace(a_report(), quantised=True)
    assert any(said in one for one in speed_sentences(report))
    records = tuple(one for one in report.records if one.drafter != TRANSFORMERS)
    assert not any(said in one for one in speed_sentences(replace(report, records=records)))


def test_a_near_tie_is_reported_with_its_gap_bound_and_floor() -> None:
    report = with_divergence(
        a_report(dtype="bfloat16"), FirstDivergence(at=5, gap=0.125, bound=0.5)
    )
    said = losslessness_sentences(report)
    assert "independent:draft was identical" in said[0]
    assert "prompt_lookup differs from plain decoding in 1 of 4 texts" in said[1]
    assert "at most 0.125, within what rounding explains (bound 0.5)" in said[1]
    assert "differs from its own plain decoding 12 times in 160 tokens" in said[2]
    assert "please report" not in " ".join(said)
    entry = summary(report)["drafters"][2]
    assert entry["identical_to_autoregressive"] is False
    assert entry["largest_gap_at_divergence"] == 0.125
    assert entry["exceeds_numerical_floor"] is False
    assert entry["divergences_over_bound"] == 0


def test_a_divergence_that_rounding_does_not_explain_is_called_a_fault() -> None:
    report = with_divergence(a_report(), FirstDivergence(at=5, gap=2.0, bound=1e-3))
    said = losslessness_sentences(report)
    assert "over the bound that rounding explains, please report it" in said[1]
    assert summary(report)["drafters"][2]["divergences_over_bound"] == 1


def with_loops(report: BenchReport) -> BenchReport:
    """30 of the 40 tokens of each text lie in loops."""
    counted = [
        replace(r, loop_tokens=30, outside_loops=None if r.steps is None else LOOPED)
        for r in report.records
    ]
    return replace(report, records=tuple(counted))


def test_loops_and_both_tokens_per_step_stand_in_summary_table_and_greedy_headlines() -> None:
    report = with_loops(a_report())
    entry = summary(report)["drafters"][2]
    assert (entry["tokens_per_step"], entry["decode_tokens_per_step"]) == (2.0, 39 / 19)
    assert entry["loop_share"] == 0.75
    assert entry["decode_tokens_per_step_outside_loops"] == 1.5
    assert entry["acceptance_rate_outside_loops"] == 0.25
    (row, *_) = [row for row in rows(report) if row["drafter"] == "prompt_lookup"]
    shown = [name for name, cell in row["cells"].items() if cell in ("2.05", "75%", "1.50", "25%")]
    assert shown == [
        "tokens per step",
        "in loops",
        "tokens per step outside loops",
        "accepted outside loops",
    ]
    page = render(report, ())
    assert all(f"<th>{name}</th>" in page for name in shown)
    for said in speed_sentences(report):
        greedy, warm = said.split("; ")
        assert "75%" in greedy and "loops" in greedy and "loops" not in warm


def test_speed_outside_of_loops_is_that_of_the_steps_there() -> None:
    """Plain decoding takes 0.5 of its 2 seconds there, the drafter 0.3 for as many tokens."""
    seconds = {BASELINE: 0.5, TRANSFORMERS: None}
    report = with_loops(a_report())
    timed = tuple(
        replace(r, seconds_outside_loops=seconds.get(r.drafter, 0.3)) for r in report.records
    )
    report = replace(report, records=timed)
    plain, _, drafted, *_ = summary(report)["drafters"]
    assert plain["speedup_outside_loops"] == 1.0
    assert drafted["speedup_outside_loops"] == pytest.approx(0.5 / 0.3)
    assert drafted["speedup_outside_loops_ci95"] == pytest.approx([0.5 / 0.3] * 2)
    cells = [row["cells"]["speed-up outside loops"] for row in rows(report)]
    assert "1.67x" in cells
    # rows that were decoded together share their steps, so one of them does not say
    drafter = drafted["name"]
    at = next(i for i, r in enumerate(timed) if r.drafter == drafter and r.temperature == 0)
    mixed = (*timed[:at], replace(timed[at], seconds_outside_loops=None), *timed[at + 1 :])
    entry = summary(replace(report, records=mixed))["drafters"][2]
    assert (entry["speedup_outside_loops"], entry["speedup_outside_loops_ci95"]) == (None, None)


def test_records_that_do_not_say_what_lies_in_loops_give_no_share() -> None:
    """Also when only some of them do not: part of the texts is not the share of all."""
    report = with_loops(a_report())
    first, *others = report.records
    mixed = replace(report, records=(replace(first, loop_tokens=None), *others))
    for old in (a_report(), mixed):
        entry = summary(old)["drafters"][0]
        assert entry["loop_share"] is None
    assert summary(a_report())["drafters"][2]["acceptance_rate_outside_loops"] is None
    assert not any("loops" in said for said in speed_sentences(a_report()))


def with_sources(report: BenchReport) -> BenchReport:
    """The 20 accepted tokens of each text are of two sources."""
    shares = {"suffix": 5, "prompt_lookup": 15}
    counted = [replace(r, by_source=shares if r.accepted else None) for r in report.records]
    return replace(report, records=tuple(counted))


def test_accepted_tokens_by_source_stand_in_summary_and_page() -> None:
    report = with_sources(a_report())
    plain, _, entry, *_ = summary(report)["drafters"]
    assert plain["accepted_by_source"] is None
    assert entry["accepted_by_source"] == {"suffix": 8 * 5, "prompt_lookup": 8 * 15}
    said = source_sentences(report)
    assert len(said) == 4, "one for each of two drafters and two temperatures"
    page = render(report, ())
    for sentence in said:
        assert "suffix 40 (25%), prompt_lookup 120 (75%)" in sentence and sentence in page


def test_records_that_do_not_say_by_source_give_no_counts() -> None:
    """Those of earlier versions; also beside some that do."""
    report = with_sources(a_report())
    first = next(r for r in report.records if r.by_source)
    mixed = tuple(replace(r, by_source=None) if r is first else r for r in report.records)
    (entry,) = [
        e
        for e in summary(replace(report, records=mixed))["drafters"]
        if (e["name"], e["temperature"]) == (first.drafter, first.temperature)
    ]
    assert entry["accepted_by_source"] is None
    assert source_sentences(a_report()) == []


def test_fewer_prompts_than_asked_for_are_said_and_recorded() -> None:
    short = replace(a_report(), asked=48)
    assert (summary(short)["prompts"], summary(short)["prompts_asked"]) == (4, 48)
    (said,) = prompt_sentences(short)
    assert "4" in said and "48" in said and "--limit" in said and said in render(short, ())
    assert prompt_sentences(replace(short, asked=4)) == prompt_sentences(a_report()) == []


def test_speed_sentences_name_each_drafter_once() -> None:
    said = speed_sentences(a_report())
    assert [sentence.split(":")[0] for sentence in said] == ["prompt_lookup", "independent"]
    assert all("at temperature 0" in s and "at temperature 0.8" in s for s in said)


def test_samples_are_of_the_lowest_temperature_and_not_of_baselines() -> None:
    found = samples(a_report())
    assert [sample["prompt"] for sample in found] == ["p0", "p1", "p2"]
    assert [text["drafter"] for text in found[0]["texts"]] == ["prompt_lookup", "independent:draft"]


def test_tags_make_a_table_when_there_are_several() -> None:
    found = tag_table(a_report())
    assert found is not None
    assert found["tags"] == ["a", "b"]
    assert len(found["rows"]) == 3 * 2
    assert all(len(row) == 4 for row in found["rows"])
    bare = replace(a_report(), records=tuple(replace(r, tag=None) for r in a_report().records))
    assert tag_table(bare) is None


def test_drafters_of_one_short_name_keep_their_long_ones() -> None:
    records = [replace(r, drafter=r.drafter.replace("x/", "")) for r in a_report().records]
    clash = [
        replace(r, drafter="independent:other/draft")
        for r in records
        if r.drafter == "independent:models/draft"
    ]
    labels = replace(a_report(), records=(*records, *clash)).labels()
    assert labels["independent:other/draft"] == "independent:other/draft"
    assert a_report().labels()["independent:models/x/draft"] == "independent:draft"
