"""Each published recipe of docs/recipes.md is held against the papers' hyper-parameters there."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.cli import parse, split_verb
from draftsmith.commands.collect import CollectOptions
from draftsmith.commands.distill import DistillOptions
from draftsmith.config import Duration
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.registry import make_drafter

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
PUBLISHED = PAGE.split("## As published")[1]
WORDS = [
    shlex.split(line) for line in re.findall(r"^    draftsmith (.*)$", PUBLISHED, re.MULTILINE)
]
LINES = {words[words.index("--out") + 1]: words for words in WORDS}
ABSENT = "-"


def tables() -> dict[str, dict[str, str]]:
    """Recipe -> row -> cell, of all tables whose columns are recipes."""
    found: dict[str, dict[str, str]] = {}
    for table in re.findall(r"(?:^\|.*\|\n)+", PUBLISHED, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()
        ]
        if head[0] == "":
            for name, *cells in rows:
                for recipe, cell in zip(head[1:], cells, strict=True):
                    assert name not in found.setdefault(recipe, {}), f"{name} of {recipe} twice"
                    found[recipe][name] = cell
    return found


TABLES = tables()
TRAININGS = list(TABLES)


class Recipe:
    """A training of the page, as our own command line reads it."""

    def __init__(self, name: str) -> None:
        self.name, self.words = name, LINES[f"drafts/{name}"]
        verb, rest = split_verb(self.words)
        self.options: Any = parse(verb, rest)
        self.options.validate()
        self.training = self.options.training

    @property
    def distil(self) -> DistillOptions:
        assert isinstance(self.options, DistillOptions)
        return self.options

    @property
    def store(self) -> CollectOptions:
        """The collection that this training reads, or one that reads nothing."""
        (folder,) = self.distil.store
        made = parse(*split_verb(LINES[str(folder)]))
        assert isinstance(made, CollectOptions)
        made.validate()
        return made

    @property
    def drafter(self) -> Drafter:
        """With the options that are given; a stage begins from the folder of the one before."""
        return make_drafter(
            self.name.rstrip("123") if self.name != "eagle3" else "eagle3", self.given
        )

    @property
    def given(self) -> tuple[str, ...]:
        return tuple(self.distil.drafter_option)

    def weight(self, name: str) -> float:
        """A term's weight in the loss: as given, or the drafter's own."""
        given = getattr(self.distil.imitation, f"{name}_weight")
        own: float = getattr(self.drafter.loss_weights, name)
        return own if given is None else given

    @property
    def blocks(self) -> int:
        blocks, rest = divmod(self.training.batch_tokens, self.training.block_length)
        assert rest == 0
        return int(blocks)

    def texts(self, cell: str) -> bool:
        devices, texts, passes = map(int, cell.split(" x "))
        assert self.distil.fitting.one_per_block, "a block holds several texts"
        # on one device the published passes are ours
        assert self.training.gradient_accumulation == passes
        return self.blocks == devices * texts * passes

    def devices(self) -> int:
        return int(TABLES[self.name]["texts of a step"].split(" x ")[0])

    def end(self, cell: str) -> bool:
        """The rate at which the published schedule, linear towards 0, is cut off."""
        rows = TABLES[self.name]
        last, warmup = int(cell), int(rows["warm-up, in steps of one device"])
        texts = int(rows["texts of a step"].split(" x ")[1])
        done = min(last, int(68_000 * 0.95) * int(rows["epochs"]) // texts)
        wanted = float(rows["learning rate"]) * (last - done) / (last - warmup)
        return self.training.min_learning_rate == pytest.approx(wanted, rel=0.005)


def option(name: str, *, group: str = "training") -> Callable[[Recipe, str], bool]:
    """A row that is an option: words are equal, numbers as numbers."""

    def same(recipe: Recipe, cell: str) -> bool:
        at: Any = recipe.options
        for part in filter(None, group.split(".")):
            at = getattr(at, part)
        value = getattr(at, name)
        values = value if isinstance(value, tuple) else (value,)
        words = cell.split()
        if isinstance(values[0], str):
            return list(values) == words
        return [float(one) for one in values] == [float(word) for word in words]

    return same


def drafters(name: str) -> Callable[[Recipe, str], bool]:
    """A row that is an option of the drafter, given or its default."""

    def same(recipe: Recipe, cell: str) -> bool:
        value = getattr(recipe.drafter.config, name, 1 if name == "num_forwards" else None)
        return value == cell if isinstance(value, str) else float(value) == float(cell)

    return same


def duration(unit: str) -> Callable[[Recipe, str], bool]:
    return lambda recipe, cell: (
        Duration.parse(recipe.training.duration) == Duration.parse(f"{cell}{unit}s")
    )


def beams(recipe: Recipe, cell: str) -> bool:
    """The beams of a store are its collection's; each text is then one of them."""
    if not recipe.distil.online:
        return recipe.store.beams == int(cell) and recipe.distil.beams is None
    return recipe.distil.beams == int(cell) and recipe.distil.prompts_per_step * int(cell) == 32


def logprobs(recipe: Recipe, cell: str) -> bool:
    options = recipe.distil
    if cell == "states":
        assert recipe.store.kept.features == "eagle" and recipe.store.gold
    return cell == ("online" if options.online else options.laws)


def kept(recipe: Recipe, cell: str) -> bool:
    top_k = recipe.distil.top_k if recipe.distil.online else recipe.store.kept.top_k
    return top_k == int(cell)


ROWS: dict[str, tuple[str, Callable[[Recipe, str], bool]]] = {
    "texts of a step": (
        "--batch-tokens --gradient-accumulation --one-per-block",
        Recipe.texts,
    ),
    "longest text": ("--block-length", option("block_length")),
    "longer texts": ("--long-texts", option("long_texts", group="fitting")),
    "epochs": ("--duration", duration("epoch")),
    "learning rate": ("--learning-rate", option("learning_rate")),
    "schedule": ("--schedule", option("schedule")),
    "ends at 0 after, in steps of one device": ("--min-learning-rate", Recipe.end),
    "warm-up, in steps of one device": (
        "--warmup",
        lambda recipe, cell: recipe.training.warmup == int(cell) // recipe.devices(),
    ),
    "AdamW betas": ("--betas", option("betas")),
    "weight decay": ("--weight-decay", option("weight_decay")),
    "clipped by value": (
        "--clip-value --clip-norm",
        lambda recipe, cell: (
            (recipe.training.clip_value, recipe.training.clip_norm) == (float(cell), math.inf)
        ),
    ),
    "clipped by norm": ("--clip-norm", option("clip_norm")),
    "divergence": ("--objective", option("objective", group="objective")),
    "logprobs": ("--laws --online --prompts", logprobs),
    "weight of the divergence": ("--token-weight", lambda r, c: r.weight("token") == float(c)),
    "weight of the states": ("--feature-weight", lambda r, c: r.weight("feature") == float(c)),
    "weight of the top 10": ("--top-weight", lambda r, c: r.weight("top") == float(c)),
    "mean over": ("--mean-over", option("mean_over", group="imitation")),
    "forwards": ("num_forwards", drafters("num_forwards")),
    "gradients of the forwards": ("gradients", drafters("gradients")),
    "noise": ("noise", drafters("noise")),
    "mask: top": ("mask_top", drafters("mask_top")),
    "weight of a step over the last": ("decay", drafters("decay")),
    "draft vocabulary": ("draft_vocab", drafters("draft_vocab")),
    "heads": ("heads", drafters("heads")),
    "residual blocks": ("layers", drafters("layers")),
    "blocks of a step": (
        "--batch-tokens --one-per-block",
        lambda recipe, cell: recipe.blocks == int(cell),
    ),
    "block": ("--block-length", option("block_length")),
    "tokens of training": ("--duration", duration("token")),
    "learning rate at the end": ("--min-learning-rate", option("min_learning_rate")),
    "warm-up, steps": ("--warmup", option("warmup")),
    "layers": ("--layers", option("layers", group="model")),
    "attention heads": ("--heads", option("heads", group="model")),
    "width": ("--hidden", option("hidden", group="model")),
    "feed-forward width": ("--intermediate", option("intermediate", group="model")),
    "temperatures of the answers": (
        "",
        lambda recipe, cell: recipe.store.sample_temperatures() == tuple(map(float, cell.split())),
    ),
    "top-p of the answers": ("", lambda recipe, cell: recipe.store.top_p == float(cell)),
    "share of text": ("--text-share --text", option("text_share", group="")),
    "best tokens that are learnt": ("--top-k", kept),
    "outside of these": ("--tail", option("tail", group="objective")),
    "beams": ("--beams --prompts-per-step", beams),
}
"""Row -> the options that it is held against, and how."""

OURS = set("--target --drafter --drafter-option --store --out --text --tokenizer".split())
"""Options that name what a user has."""
UNPUBLISHED = {
    "eagle3": {"--min-learning-rate"},
    "medusa": {"--min-learning-rate", "--warmup"},
    "beams": {"--block-length"},
}
"""What is given although it is no published number; the page says why."""


@pytest.mark.parametrize("name", TRAININGS)
def test_each_option_of_a_recipe_is_the_published_one(name: str) -> None:
    recipe = Recipe(name)
    wrong = [
        f"{row}: published {cell}"
        for row, cell in TABLES[name].items()
        if cell != ABSENT and not ROWS[row][1](recipe, cell)
    ]
    assert not wrong, f"{' '.join(recipe.words)}\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", TRAININGS)
def test_no_option_of_a_recipe_is_without_a_source(name: str) -> None:
    recipe = Recipe(name)
    published = [row for row, cell in TABLES[name].items() if cell != ABSENT]
    known = OURS | {one for row in published for one in ROWS[row][0].split()}
    flags = {word for word in recipe.words if word.startswith("--")}
    given: set[str] = set()
    if isinstance(recipe.options, DistillOptions):
        given = {one.partition("=")[0] for one in recipe.given}
    extra = (flags | given) - known - UNPUBLISHED.get(name, set())
    assert not extra, f"{name}: no row of the tables is about {sorted(extra)}"


def test_every_training_of_the_section_has_its_column_and_every_column_its_source() -> None:
    made = [name for name, words in LINES.items() if words[0] in ("distill", "pretrain")]
    assert sorted(made) == sorted(f"drafts/{name}" for name in TRAININGS)
    sources = PUBLISHED.split("where it says so")[1].split("### What")[0]
    named = [
        name
        for cells in re.findall(r"^\| ([a-z0-9, -]+) \|", sources, re.MULTILINE)
        for name in cells.split(", ")
    ]
    assert sorted(named) == sorted(TRAININGS)
