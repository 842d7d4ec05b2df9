"""Fill the blocks of measurements in README.md, docs/measured.md, docs/engine.md and
docs/drafters-compared.md, and draw two figures.

    draftsmith quickstart --models models/mini-code --out runs/mini-code   # on an idle machine
    python benchmarks/readme.py

Reads runs/mini-code/summary.json and benchmarks/results/*.json; what is not there is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from draftsmith.core.speedup import rejections_saved
from draftsmith.plots import Plot
from draftsmith.provenance import atomic_path, write_text_atomic
from figures import best_and_plain, drafter_of, engines, methods
from griffin_table import order, stages
from griffin_table import table as griffin_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SIDES = (("alpha", "{:.1%}"), ("decode_tokens_per_step", "{:.2f}"), ("speedup", "{:.2f}"))
LIVE = ["", "speed-up", "erased per final piece", "drafts kept", "chrF", "BLEU"]
DRAFTED = (("own", "0"), ("chain", "1"))
"""Shape and temperature of the drafters that are shown."""
CORE = {
    "110 M bfloat16: plain decoding, speed over transformers generate": "plain decoding over "
    "transformers' `generate`, 110 M",
    "mini-code: plain decoding, speed over transformers generate": "the same, mini-code",
    "drafts of 8 that are always right: speed-up": "drafts of 8 that are always right, speed-up",
    "the same, of the ideal": "the same, of the ideal",
}


def number(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)


def interval(value: float | None, pair: Any) -> str:
    """A value with its interval, if there is one."""
    if value is None:
        return ""
    low, high = (pair["low"], pair["high"]) if isinstance(pair, dict) else pair or (None, None)
    return number(value) + ("" if low is None else f" ({low:.2f} to {high:.2f})")


def saved(one: dict[str, Any]) -> float | None:
    """The share of the undistilled draft's rejections that distillation saves, if that is known."""
    alpha, before = one["after"].get("alpha"), one["before"].get("alpha")
    if alpha is None or before is None or before == 1:
        return None
    return float(rejections_saved(alpha, before))


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'---:|' * (len(head) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def quickstart() -> Iterator[str]:
    folder = ROOT / "runs" / "mini-code"
    if not (folder / "run.json").exists():
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    ended = json.loads((folder / "run.json").read_text(encoding="utf-8"))["ended"]
    found = [one for one in summary["drafters"] if one["name"] != "transformers"]
    yield (
        f"`draftsmith quickstart` on {ended[:10]}: {found[0]['prompts']} held-out pieces of "
        "Python code on `models/mini-code` (8.4 M target, 0.7 M draft), batch 1, medians and 95 % "
        "intervals."
    )
    yield ""
    rows = []
    for one in found:
        plain = one["name"] == "none"
        same = {None: "", True: "yes", False: "no"}[one["identical_to_autoregressive"]]
        rows.append(
            [
                "plain decoding" if plain else one["name"].partition(":")[0],
                f"{one['temperature']:g}",
                number(one.get("decode_tokens_per_step")),
                number(one["acceptance_rate"], "{:.0%}"),
                number(one.get("loop_share"), "{:.0%}"),
                number(one.get("decode_tokens_per_step_outside_loops")),
                "1" if plain else interval(one["speedup"], one["speedup_ci95"]),
                "" if plain else number(one["predicted_speedup"]),
                number(one["speedup_vs_transformers"]),
                "" if plain else same,
            ]
        )
    head = ["drafter", "T", "tokens/step", "accepted", "in loops", "tokens/step outside"]
    head += ["speed-up", "predicted"]
    yield from table([*head, "over transformers' `generate`", "same tokens"], rows)
    distilled = summary.get("distillation")
    if distilled:
        yield f"{distilled['sentence']}"
        yield ""
        rows = [
            [
                f"{one['temperature']:g}",
                *(
                    " -> ".join(number(one[side].get(key), form) for side in ("before", "after"))
                    for key, form in SIDES
                ),
                number(saved(one), "{:.1%}"),
            ]
            for one in distilled["temperatures"]
        ]
        yield from table(["T", "acceptance", "tokens/step", "speed-up", "rejections saved"], rows)
        yield (
            "Greedy texts of a model this small repeat themselves: prompt lookup and a distilled "
            "draft are quick to say them again. The column *outside* counts only steps that begin "
            "outside of such loops; temperature 0.8, too, shows more of what to expect."
        )
        yield ""


def core() -> Iterator[str]:
    path = RESULTS / "core.json"
    if not path.exists():
        return
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"].values()
    figures = [figure for part in parts for figure in part["figures"]]
    yield (
        "The core, on a 110 M bfloat16 model with random weights and a vocabulary of 32,000 "
        "([all figures](../benchmarks/results/core.md)):"
    )
    yield ""
    first = {figure["what"]: figure for figure in reversed(figures)}
    rows = [
        [
            name,
            interval(first[what]["value"], (first[what]["low"], first[what]["high"])),
            number(first[what]["bar"], "{:g}"),
        ]
        for what, name in CORE.items()
        if what in first
    ]
    every: list[tuple[str, str, Callable[[list[float]], float], str]] = [
        ("engine efficiency", "engine efficiency, the least of all drafters", min, "0.9"),
        ("off 1 by", "measured against predicted speed-up, farthest off", max, "at most 0.1"),
    ]
    for end, name, worst, bar in every:
        values = [figure["value"] for figure in figures if figure["what"].endswith(end)]
        if values:
            rows.append([name, number(worst(values)), bar])
    yield from table(["what", "measured", "must reach"], rows)


def drafters() -> Iterator[str]:
    path = RESULTS / "drafters-mini-code.json"
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if "methods" not in found:
        return
    ours = [found["combination"]["row"]] if "combination" in found else []
    timed = found["timed"]["drafters"] if "timed" in found else {}
    shares = " and ".join(f"{v:.0%} at T = {t}" for t, v in found["loop_share"].items())
    other = "[the same on `models/mini-ende`](../benchmarks/results/drafters-mini-ende.md)"
    yield (
        "Drafters of `models/mini-code`: in their own trees at temperature 0, as chains of five "
        "at temperature 1 (of the top tokens that most of these trees hold few are drawn). "
        "Those over hidden states have learnt from the same prompts and as many tokens, ours "
        "from four answers to each; SpS is the draft model as shipped ([all figures]"
        f"(../benchmarks/results/drafters-mini-code.md), {other}). Of the target's own tokens "
        f"{shares} lie in repetition loops, which flatter every drafter:"
    )
    yield ""
    rows = [
        [row["label"], *(cell for way in DRAFTED for cell in drafted(row, *way, timed))]
        for row in (*found["methods"]["rows"], *ours)
        if row["label"] != "plain"
    ]
    measures = ("tokens/step", "speed-up")
    head = [f"T = {temperature}: {what}" for _, temperature in DRAFTED for what in measures]
    yield from table(["drafter", *head], rows)


def drafted(
    row: Mapping[str, Any], shape: str, temperature: str, timed: Mapping[str, Any]
) -> Iterator[str]:
    value, *ends = row["tau"][shape][temperature]
    yield interval(value, ends)
    one = timed[row["label"]][shape][temperature] if row["label"] in timed else None
    yield "" if one is None else interval(one["speedup"], one["interval"])


def peers(
    record: str = "peers.json", select: Callable[[list[Any]], list[Any]] = list
) -> Iterator[str]:
    """The engines of a record, or of those rows of it that `select` takes."""
    path = RESULTS / record
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    suites = ", ".join(f"{count} of {name}" for name, count in found["prompts"].items())
    threads = found["threads"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    shown = select(found["rows"])
    shares = [one["loop_share"] for one in shown if one.get("loop_share") is not None]
    loops = ""
    if shares:
        ends = " to ".join(dict.fromkeys(f"{of(shares):.0%}" for of in (min, max)))
        loops = f" In repetition loops, which flatter drafts, lie {ends} of the tokens."
    yield (
        f"SmolLM2-135M-Instruct (Q4_1) on {found['machine']['cpu']}, {threads} cores: tokens per "
        f"second behind the first of {found['max_new_tokens']} greedy tokens, batch 1, prompts: "
        f"{suites}; all engines in turns in one run, 95 % intervals over prompts "
        f"({versions}).{loops}"
    )
    yield ""
    rows = []
    for one in shown:
        name = "**draftsmith**" if one["engine"] == "draftsmith" else one["engine"]
        low, high = one["ci95"]
        speed = f"{one['tokens_per_second']:.0f} ({low:.0f} to {high:.0f})"
        ratio = interval(one.get("over_llama_cpp"), one.get("over_llama_cpp_ci95"))
        rows.append([name, one["weights"], drafter_of(one), speed, ratio])
    yield from table(["engine", "weights", "drafter", "tokens/s", "over llama.cpp, plain"], rows)


def engine() -> Iterator[str]:
    path = RESULTS / "engine.json"
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    costs = found["costs"]
    widths = [width for width in costs["bf16"] if width in ("1", "2", "4", "8", "16", "64")]
    yield (
        f"Milliseconds of a forward by its number of tokens, SmolLM2-135M-Instruct (Q4_1), "
        f"{found['machine']['cpu']}, {found['machine']['cpus']} cores:"
    )
    yield ""
    rows = [[name, *(number(line[w], "{:.1f}") for w in widths)] for name, line in costs.items()]
    yield from table(["weights", *widths], rows)
    if "floors" in found:
        yield (
            "Milliseconds in which `torch.sum` reads as many bytes as the matrices have, and their "
            "share of a forward of one token (above 100 %: the engine reads faster than that):"
        )
        yield ""
        rows = [
            [
                name,
                f"{floor['bytes'] / 1e6:.0f} MB",
                f"{floor['milliseconds']:.1f}",
                f"{floor['milliseconds'] / costs[name]['1']:.0%}",
            ]
            for name, floor in found["floors"].items()
        ]
        yield from table(["weights", "matrices", "milliseconds", "share"], rows)
    if "perplexity" not in found:
        return
    read = found["perplexity"]
    kinds = list(next(iter(read.values())))
    base = read["transformers, float32"]
    counts = " and ".join(f"{base[kind]['tokens']:,} tokens of {kind}" for kind in kinds)
    yield f"Perplexity ({counts}), and what it is more than that of the weights in float32:"
    yield ""
    rows = [
        [
            name,
            *(
                f"{one[kind]['perplexity']:.3f} "
                f"({100 * (one[kind]['perplexity'] / base[kind]['perplexity'] - 1):+.2f} %)"
                for kind in kinds
            ),
        ]
        for name, one in read.items()
    ]
    yield from table(["weights", *kinds], rows)


def griffin(name: str = "griffin-table.json") -> Iterator[str]:
    """The table of GRIFFIN's paper on the real model."""
    path = RESULTS / name
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    sizes = ", ".join(f"{count} of {suite}" for suite, count in found["prompts"].items())
    timed = found["timed_prompts"]
    yield (
        f"SmolLM2-135M-Instruct (Q4_1), {found['max_new_tokens']} tokens, prompts: {sizes}; tokens "
        "per step behind the prompt's own, with 95 % intervals over prompts"
        + (
            f"; speeds: {timed} prompts of each suite on {found['machine']['cpu']}, "
            if timed
            else ""
        )
        + (f"{found['machine']['cpus']} cores, nothing else running:" if timed else ":")
    )
    yield ""
    yield from griffin_table.table(found["rows"], list(found["prompts"])).splitlines()
    ranked = griffin_table.ranking(found["rows"])
    if ranked:
        yield ""
        yield (
            "Tokens per step, means of the suites, with 95 % intervals over prompts that are drawn "
            "for both methods at once:"
        )
        yield ""
        yield from ranked.splitlines()
    further = griffin_table.seeds_table(found["rows"])
    if further:
        yield from ("", "Trained again with other seeds, means of the suites:", "")
        yield from further.splitlines()


def griffin_order(name: str = "griffin-order.json") -> Iterator[str]:
    """Short continuations of trained drafters."""
    path = RESULTS / name
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    tokens = {row["trained_tokens"] for row in found["rows"]}
    yield (
        f"Chains of five below every position of {found['prompts']} greedy texts of the three "
        f"suites; each setting has gone on for {max(tokens):,} tokens in steps of "
        f"{found['batch_tokens']:,}, at a rate of {found['learning_rate']:g}:"
    )
    yield ""
    yield from order.table(found["rows"]).splitlines()


def griffin_stages() -> Iterator[str]:
    """The published stages beside drafters with one forward that learn as long."""
    path = RESULTS / "griffin-stages.json"
    if not path.exists():
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    yield (
        f"Chains of five below every position of {found['prompts']} greedy texts of the three "
        f"suites; steps of {found['batch_tokens']:,} tokens, at a rate of "
        f"{found['learning_rate']:g} (from nothing {found['first_rate']:g}); time in that of a "
        "step of FSPAD:"
    )
    yield ""
    yield from stages.table(found["rows"]).splitlines()


def live_row(row: Mapping[str, Any]) -> list[str]:
    return [
        "re-translation" if row["bias"] is None else f"bias {row['bias']:g}",
        number(row["speedup"]),
        number(row["ne"]),
        number(row["ad"], "{:.0%}"),
        *(number(row[name], "{:.1f}") for name in ("chrf", "bleu")),
    ]


def live() -> Iterator[str]:
    trained = "(how: [live](live.md#train-for-it))"
    for name, model in (
        ("live_flores", "`models/mini-ende`, over re-translation without drafts"),
        ("live_beginnings", f"the same model trained further, also on beginnings {trained}"),
    ):
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        yield (
            f"Live translation, {found['sentences']} FLORES sentences that grow by three words, "
            f"{model} ([tables](../benchmarks/results/{name}/tables.md)):"
        )
        yield ""
        yield from table(LIVE, [live_row(row) for row in found["rows"] if not row["mask_k"]])


def draw(figure: Plot[Any, Any], record: str, picture: str) -> None:
    """Draw the figure of a record for a page."""
    path = RESULTS / record
    if not path.exists():
        return
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    with atomic_path(ROOT / picture) as part:
        part.write_bytes(figure.draw(rows).png)


def fill(page: str, lines: list[str], name: str = "measured") -> None:
    """Replace the block of a page that has this name; with nothing to put there it stays."""
    if not lines:
        return
    path, begin, end = ROOT / page, f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    write_text_atomic(path, before + begin + "\n".join(lines).rstrip("\n") + "\n" + end + after)


def machine() -> list[str]:
    """The machine of the quickstart run."""
    path = ROOT / "runs" / "mini-code" / "run.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["machine"]
    return [f"{found['cpu'] or 'A CPU'}, {found['cpus']} cores, no GPU.", ""]


def main() -> None:
    draw(engines, "peers.json", "docs/measured/engines.png")
    draw(methods, "griffin-equal-2.json", "docs/drafters-compared/methods.png")
    fill("README.md", [*peers(select=best_and_plain)])
    fill("docs/engine.md", [*engine()], "engine")
    fill("docs/drafters-compared.md", [*griffin()], "griffin")
    fill("docs/drafters-compared.md", [*griffin("griffin-shipped.json")], "shipped")
    fill("docs/drafters-compared.md", [*griffin("griffin-equal.json")], "equal")
    fill("docs/drafters-compared.md", [*griffin("griffin-equal-2.json")], "again")
    fill("docs/drafters-compared.md", [*griffin_order()], "order")
    fill("docs/drafters-compared.md", [*griffin_order("griffin-order-2.json")], "order-again")
    fill("docs/drafters-compared.md", [*griffin_stages()], "stages")
    fill("docs/measured.md", [*peers()], "real")
    fill("docs/measured.md", [*peers("peers-draft-model.json")], "draft-model")
    fill("docs/measured.md", [*machine(), *quickstart()], "quickstart")
    fill("docs/measured.md", [*core(), *drafters(), *live()])


if __name__ == "__main__":
    main()
