"""The study of drafters as Markdown, in the layout of GRIFFIN's tables: methods below each other,
speed-up and tokens per step side by side, greedy first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation import shape_name

from drafters.rows import TEMPERATURES
from drafters.runs import CHAIN, DRAWN

Row = Mapping[str, Any]
ABSENT = "-"


def write(record: Mapping[str, Any]) -> str:
    """All parts that are there."""
    steps, tokens = record["amounts"]["steps"], record["tokens_per_step"]
    out = [
        f"# Drafters of {record['model']}",
        "",
        f"Trained on the same prompts, {steps} steps of {tokens} tokens each, in one stage unless "
        "said. tau: tokens per forward of the target, its own token included, counted while "
        "decoding, behind the prompt's own step; 95 % intervals over prompts and, where there are "
        "several, seeds. SpS drafts with the draft model as it is shipped, which has seen far more "
        "text.",
        "",
    ]
    if "loop_share" in record:
        shares = [f"{100 * share:.0f} % at T = {at}" for at, share in record["loop_share"].items()]
        out += [
            "Share of the target's own tokens in repetition loops (period at most 32, three times "
            f"or more), which flatter every drafter: {', '.join(shares)}.",
            "",
        ]
    if "methods" in record:
        rows = methods(record)
        out += [*_main(record), *_shared(record), *_loops(rows), *_depths(rows), *_costs(rows)]
        out += _differences("Differences", record["methods"]["differences"])
    if "rates" in record:
        out += _rates(record["rates"])
    if "combination" in record:
        out += _combination(record["combination"])
    if "ablations" in record:
        out += _ablations(record["ablations"])
    if "stages" in record:
        below = "One stage and several"
        out += _compared("With forwards that grow in stages", record["stages"], below)
    if "longer" in record:
        below = "In the order of the paper, after as many"
        title = "After {steps} steps, {seeds} seed(s)".format(**record["longer"])
        out += _compared(title, record["longer"], below)
    return "\n".join(out)


def methods(record: Mapping[str, Any]) -> list[Row]:
    """Those of the literature, and ours once it is known."""
    ours = [record["combination"]["row"]] if "combination" in record else []
    return [*record["methods"]["rows"], *ours]


def _main(record: Mapping[str, Any]) -> list[str]:
    head = ["method", "drafts"]
    for temperature in TEMPERATURES:
        head += [f"T = {temperature:g}: speed-up", "tau"]
    lines = []
    for row in methods(record):
        line = [row["label"], row["shape"]]
        for at in map("{:g}".format, TEMPERATURES):
            line += [_speedup(record, row, "own", at), _spread(row["tau"]["own"][at])]
        lines.append(line)
    return _table(head, lines)


def _shared(record: Mapping[str, Any]) -> list[str]:
    head = ["method"]
    for temperature in TEMPERATURES:
        head += [
            f"T = {temperature:g}: {shape_name(CHAIN)}: speed-up",
            "tau",
            f"{shape_name(DRAWN)}: tau",
        ]
    lines = []
    for row in methods(record):
        line = [row["label"]]
        for at in map("{:g}".format, TEMPERATURES):
            line.append(_speedup(record, row, "chain", at))
            line += [_spread(row["tau"][shape][at]) for shape in ("chain", "drawn")]
        lines.append(line)
    return [
        "## In the same shapes",
        "",
        "Above, trees that grow take the top tokens at every temperature; these shapes draw "
        "at T = 1 (the chain as it comes, the tree without replacement), where a drafter has laws "
        "to draw from. Shorter where it has no more: Medusa and Lookahead draft 4; PLD and "
        "Lookahead have no such tree.",
        "",
        *_table(head, lines),
    ]


def _loops(rows: Sequence[Row]) -> list[str]:
    """Greedy decoding, all steps and those outside of loops, where these were counted."""
    lines = []
    for row in rows:
        line = [row["label"]]
        for shape in ("own", "chain"):
            found = row.get("decoded", {}).get(shape, {}).get("0", {})
            line += [
                _beside(row["tau"][shape]["0"][0], found.get("tau_outside_loops")),
                _beside(found.get("accepted"), found.get("accepted_outside_loops")),
                f"{found['loop_share']:.0%}" if "loop_share" in found else ABSENT,
            ]
        if "tau_outside_loops" in found:
            lines.append(line)
    if not lines:
        return []
    head = ["method"]
    for name in ("own tree", shape_name(CHAIN)):
        head += [f"{name}: tau, all / outside", "accepted, all / outside", "in loops"]
    return [
        "## Outside of repetition loops",
        "",
        "T = 0. A step belongs to the place where it begins.",
        "",
        *_table(head, lines),
    ]


def _beside(whole: float | None, outside: float | None) -> str:
    return " / ".join(ABSENT if value is None else f"{value:.2f}" for value in (whole, outside))


def _speedup(record: Mapping[str, Any], row: Row, shape: str, temperature: str) -> str:
    timed = record["timed"]["drafters"] if "timed" in record else {}
    found = timed[row["label"]][shape][temperature] if row["label"] in timed else None
    if found is None:
        return ABSENT
    ends = found["interval"]
    return f"{found['speedup']:.2f}x" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def _depths(rows: Sequence[Row]) -> list[str]:
    """Figures of the first and the last place that all drafters learn, by depth."""
    lines = [
        [row["label"], row["store"], *(_by_depth(row, name) for name in _SHOWN)]
        for row in rows
        if "held_out" in row
    ]
    return [
        "## On held-out texts, by depth of the draft",
        "",
        "Each on texts of its own store, so only rows of one store compare. The target was trained "
        "on the files of these prompts, so that these figures are higher than on others. "
        "`misaligned` begins at the second draft.",
        "",
        *_table(["method", "store", *_SHOWN], lines),
    ]


_SHOWN = ("accuracy", "survival", "acceptance", "misaligned")


def _by_depth(row: Row, name: str) -> str:
    return " ".join(f"{value:.2f}" for value in row["held_out"].get(name, [])) or ABSENT


def _costs(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            row["label"],
            f"{row['parameters']:,}",
            f"{row['tokens']:,}" if "tokens" in row else ABSENT,
            f"{row['cpu_seconds']:,.0f}" if "cpu_seconds" in row else ABSENT,
            str(row["seeds"]),
        ]
        for row in rows
    ]
    head = ["method", "parameters", "tokens trained on", "CPU seconds", "seeds"]
    return ["## Cost", "", *_table(head, lines)]


def _rates(part: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    rates = list(next(iter(part.values())))
    lines = [[label, *(_spread(some[rate]) for rate in rates)] for label, some in part.items()]
    return [
        "## By learning rate",
        "",
        "Mean tau of all shapes at T = 0 and 1, one seed, on the prompts that settings are chosen "
        "by. All other tables are of one rate for all.",
        "",
        *_table(["method", *rates], lines),
    ]


def _combination(part: Mapping[str, Any]) -> list[str]:
    grid = {tuple(label.rsplit(", ", 1)): value for label, value in part["grid"].items()}
    against = _differences("The best, and networks as published", part["differences"])
    if not grid:
        title, *table = against
        return [title, "", f"Not chosen here, but given: {part['best']}.", *table]
    objectives = list(dict.fromkeys(objective for objective, _ in grid))
    texts = list(dict.fromkeys(text for _, text in grid))
    lines = [
        [objective, *(_spread(grid[objective, text]) for text in texts)] for objective in objectives
    ]
    return [
        "## Networks, by objective and texts",
        "",
        "Mean tau of all shapes at T = 0 and 1, one seed, on the prompts that the best is "
        f"chosen by: {part['best']}. It was chosen among {len(grid)}, so its own figure here is "
        "too good; below, on other prompts and with all seeds.",
        "",
        *_table(["objective", *texts], lines),
        *against,
    ]


def _ablations(part: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in part["rows"]:
        against = row["against"]
        ratio = (
            _spread([against[key] for key in ("ratio", "low", "high")], 3) if against else ABSENT
        )
        taus = [_spread(row["tau"]["own"][f"{temperature:g}"]) for temperature in TEMPERATURES]
        seeds = " ".join(f"{tau:.2f}" for tau in row["by_seed"])
        lines.append([row["label"], *taus, seeds, row["base"], ratio])
    head = [
        "drafter",
        *(f"tau, T = {temperature:g}" for temperature in TEMPERATURES),
        "all shapes",
        "beside",
        "ratio",
    ]
    return [
        "## What each choice brings",
        "",
        "tau: in its own tree. All shapes: the mean of all at both temperatures, of each seed. "
        "Ratio: of their means, over that of the drafter beside; intervals over prompts and seeds.",
        "",
        *_table(head, lines),
    ]


def _compared(title: str, part: Mapping[str, Any], below: str) -> list[str]:
    lines = []
    for row in part["rows"]:
        taus = [
            _spread(row["tau"][shape][f"{h:g}"]) for h in TEMPERATURES for shape in ("own", "drawn")
        ]
        lines.append([row["label"], *taus])
    head = ["method"]
    for temperature in TEMPERATURES:
        head += [f"T = {temperature:g}: tau, own tree", shape_name(DRAWN)]
    return [f"## {title}", "", *_table(head, lines), *_differences(below, part["differences"])]


def _differences(title: str, differences: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        [
            f"{one['better']} / {one['worse']}",
            one["over"],
            _spread([one[key] for key in ("ratio", "low", "high")], 3),
        ]
        for one in differences
    ]
    return [f"## {title}", "", *_table(["tau of", "over", "ratio"], lines)]


def _spread(three: Sequence[float], digits: int = 2) -> str:
    mean, low, high = (f"{value:.{digits}f}" for value in three)
    return f"{mean} ({low} to {high})"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *lines]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]
