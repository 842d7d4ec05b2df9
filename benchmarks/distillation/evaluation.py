"""What a drafter is worth, measured by decoding: the same exam for every run of a study.

    tokens per step    chains and a tree, at each temperature, counted while really decoding, behind
                       the prompt's own step: lookups and draft models draft in it, drafters over
                       hidden states cannot; also outside of repetition loops, with their share
    acceptance         of draft models: sum of min(p, q) on the target's own texts, without draws
    quality            of draft models: chrF and BLEU of their own greedy texts

No clock is read, so several exams may run side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.bench.loops import StepCounts, count_outside, in_loops
from draftsmith.core.config import LOSSY_RULES
from draftsmith.core.decode import DecodeOptions, decode
from draftsmith.core.generation import DraftCounts
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import DecodeStep, TreeShape
from draftsmith.data.prompts import Prompt
from draftsmith.data.suites import load_prompts
from draftsmith.distill.acceptance import measure_acceptance
from draftsmith.distill.trajectories.collect import TransformersBackend
from draftsmith.distill.trajectories.types import (
    CollectRequest,
    CollectSettings,
    Trajectory,
)
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.independent import Independent
from draftsmith.drafters.none import NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.provenance import digest, write_text_atomic
from draftsmith.targets.hf import HFTarget, load_target

if TYPE_CHECKING:
    from recorded import Recorded

COUNTED = "behind the prompt's own step"
"""Which steps; figures that counted others are of another exam."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What is asked of every drafter of a study."""

    target: str
    prompts: Path
    """JSONL; `reference` makes the quality of a draft model's own texts measurable."""
    limit: int
    """How many prompts; fewer where the file has no more (see `short`)."""
    max_new_tokens: int
    skip: int = 0
    """So many prompts come before them (and are for another exam)."""
    chains: tuple[int, ...] = (5, 8)
    tree: tuple[int, ...] = (4, 2, 2, 1)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_p: float = 1.0
    batch_size: int = 32
    seed: int = 0

    @property
    def key(self) -> str:
        """Changes when anything that the figures depend on does."""
        prompts = [[prompt.id, prompt.text] for prompt in self.read()]
        return digest(asdict(self) | {"target": "", "prompts": prompts, "counted": COUNTED})

    def read(self) -> tuple[Prompt, ...]:
        return load_prompts(self.prompts, limit=self.skip + self.limit)[self.skip :]

    def short(self) -> str | None:
        """What to say when the file has fewer prompts than are asked for; None: it has enough."""
        found = len(self.read())
        if found == self.limit:
            return None
        return f"{self.prompts.name}: {found} prompts, {self.limit} were asked for"

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        chains = [TreeShape.chain(gamma) for gamma in self.chains]
        return (*chains, TreeShape(widths=self.tree)) if self.tree else tuple(chains)

    def sampler(self, temperature: float) -> Sampler:
        return Sampler(temperature=temperature, top_p=self.top_p if temperature > 0 else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """One shape of drafts at one temperature. Lists go over prompts."""

    shape: TreeShape
    temperature: float
    tokens: tuple[int, ...]
    """Without those of the prompt's own step."""
    steps: tuple[int, ...]
    """Forwards of the target, without the prompt's own."""
    accepted: tuple[int, ...] = ()
    """In these steps. Empty, as are all below, in marks from before this was counted."""
    offered: tuple[int, ...] = ()
    loop_tokens: tuple[int, ...] = ()
    """How many of `tokens` lie in repetition loops."""
    outside: tuple[StepCounts, ...] = ()
    """The steps that begin outside of loops."""
    by_depth: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Per prompt and depth: (steps that offered drafts so deep, all before them accepted; of these,
    how many accepted one there)."""

    @property
    def tau(self) -> float:
        return sum(self.tokens) / sum(self.steps)

    @property
    def accepted_share(self) -> float:
        return sum(self.accepted) / sum(self.offered)

    @property
    def around_loops(self) -> dict[str, float]:
        """Acceptance, share of loops, and tau and acceptance outside of these: what is known."""
        whole = len(self.loop_tokens) == len(self.tokens)  # seeds may be of older and newer marks
        outside = self.outside if whole else ()
        ratios = {
            "accepted": (sum(self.accepted), sum(self.offered)),
            "loop_share": (sum(self.loop_tokens), sum(self.tokens) if whole else 0),
            "tau_outside_loops": (sum(o.tokens for o in outside), sum(o.steps for o in outside)),
            "accepted_outside_loops": (
                sum(o.accepted for o in outside),
                sum(o.offered for o in outside),
            ),
        }
        return {name: round(above / below, 4) for name, (above, below) in ratios.items() if below}

    def of(self, prompts: slice) -> Decoded:
        """The same over these prompts only."""
        lists = ("tokens", "steps", "accepted", "offered", "loop_tokens", "outside", "by_depth")
        return replace(self, **{name: getattr(self, name)[prompts] for name in lists})

    @property
    def name(self) -> str:
        return f"{shape_name(self.shape)}, T = {self.temperature:g}"

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Decoded:
        shape = found["shape"]
        if isinstance(shape, list):  # older marks know widths alone
            shape = {"widths": shape, "paths": [], "keep": None}
        return cls(
            shape=TreeShape(
                widths=tuple(shape["widths"]),
                paths=tuple(tuple(path) for path in shape["paths"]),
                keep=shape["keep"],
            ),
            temperature=found["temperature"],
            **{
                name: tuple(found.get(name, ()))
                for name in ("tokens", "steps", "accepted", "offered", "loop_tokens")
            },
            outside=tuple(StepCounts(**one) for one in found.get("outside", ())),
            by_depth=tuple(tuple(map(tuple, one)) for one in found.get("by_depth", ())),
        )


def shape_name(shape: TreeShape) -> str:
    """In few words."""
    if shape.is_chain:
        return f"chain {shape.depth}" if shape.depth else "no drafts"
    if shape.paths:
        return f"tree of {shape.num_nodes} nodes"
    if shape.is_dynamic:
        return f"tree {shape.widest}x{shape.depth}:{shape.keep}"
    return "tree " + ",".join(map(str, shape.widths))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The result of an exam."""

    exam: str
    """Its key."""
    decoded: tuple[Decoded, ...]
    alpha: dict[str, float]
    """Expected acceptance per token, by temperature; empty for drafters that are no models."""
    chrf: float | None
    bleu: float | None

    def tau(self, shape: TreeShape, temperature: float) -> float:
        return self.find(shape, temperature).tau

    def find(self, shape: TreeShape, temperature: float) -> Decoded:
        for one in self.decoded:
            if one.shape == shape and one.temperature == temperature:
                return one
        raise KeyError(f"no {shape_name(shape)} at temperature {temperature:g} was measured")

    @property
    def chains(self) -> tuple[Decoded, ...]:
        return tuple(one for one in self.decoded if one.shape.is_chain)

    @property
    def mean_tau(self) -> float:
        """Over all chains and temperatures."""
        return sum(one.tau for one in self.chains) / len(self.chains)

    def of(self, prompts: slice) -> Scores:
        """Tokens per step over these prompts only; what is no count per prompt is left out."""
        decoded = tuple(one.of(prompts) for one in self.decoded)
        return replace(self, decoded=decoded, alpha={}, chrf=None, bleu=None)

    @classmethod
    def read(cls, path: Path) -> Scores:
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Scores:
        return cls(
            exam=content["exam"],
            decoded=tuple(Decoded.from_json(one) for one in content["decoded"]),
            alpha=content["alpha"],
            chrf=content["chrf"],
            bleu=content["bleu"],
        )


UNITS = {"Chinese": "zh", "Japanese": "char"}
"""What BLEU counts in languages that are written without spaces (names of sacrebleu)."""


def sit(exam: Evaluation, drafter: str, tree: TreeShape | None = None) -> Scores:
    """Examine a drafter (KIND, KIND:SOURCE or a folder), also with a tree of its own."""
    target, prompts = _target(exam.target), exam.read()
    tokens = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    shapes = exam.shapes if tree is None else (*exam.shapes, tree)
    decoded = [
        count(exam, target, ready(drafter, target, shape), tokens, shape, temperature)
        for temperature in exam.temperatures
        for shape in shapes
    ]
    marks = Scores(exam=exam.key, decoded=tuple(decoded), alpha={}, chrf=None, bleu=None)
    model = load_drafter(drafter)
    if not isinstance(model, Independent):
        return marks
    draft = load_target(model.config.source)
    alpha = {
        f"{temperature:g}": measure_acceptance(
            target,
            draft,
            _texts(exam, temperature),
            exam.sampler(temperature),
            batch_size=exam.batch_size,
        ).alpha
        for temperature in exam.temperatures
    }
    chrf, bleu = quality(prompts, greedy_texts(exam, draft, tokens))
    return replace(marks, alpha=alpha, chrf=chrf, bleu=bleu)


def ready(name: str, target: HFTarget, shape: TreeShape) -> Drafter:
    """A drafter, bound, that draws its children in the way that is best verified (at temperature 0
    and in trees that grow it takes the top tokens, whatever it is told)."""
    drafter = load_drafter(name)
    if hasattr(drafter.config, "proposal"):
        proposal = "sampled" if shape.is_chain else "without_replacement"
        drafter = load_drafter(name, [f"proposal={proposal}"])
    drafter.bind(target)
    return drafter


def count(
    exam: Evaluation,
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shape: TreeShape,
    temperature: float,
    rule: str = "auto",
    recorded: Recorded | None = None,
) -> Decoded:
    """Decode all prompts and count tokens and steps, in and outside of repetition loops.

    Args:
        recorded: the target's own texts of these prompts at this temperature; they are repeated in
            place of decoding. For drafts that do not depend on the verifier's noise.
    """
    if rule == "auto" and getattr(drafter.config, "proposal", None) == "sampled":
        rule = "rejection"  # records go on from what was counted before `auto` took `block`
    options = DecodeOptions(
        sampler=exam.sampler(temperature if recorded is None else 0.0),
        max_new_tokens=exam.max_new_tokens,
        shape=shape,
        seed=exam.seed,
        rule=rule,
        allow_lossy=rule in LOSSY_RULES,
    )
    rows_of: dict[int, _Counts] = {}
    for rows in batches(prompts, exam.batch_size):
        chosen = [prompts[row] for row in rows]
        model = target if recorded is None else recorded.rows(rows)
        steps = list(decode(model, drafter, chosen, options, request_ids=rows))
        rows_of |= {row: _counted(steps, b) for b, row in enumerate(rows)}
    columns = zip(*(rows_of[row] for row in range(len(prompts))), strict=True)
    tokens, taken, accepted, offered, looped, outside, by_depth = columns
    return Decoded(
        shape=shape,
        temperature=temperature,
        tokens=tokens,
        steps=taken,
        accepted=accepted,
        offered=offered,
        loop_tokens=looped,
        outside=outside,
        by_depth=by_depth,
    )


_Counts = tuple[int, int, int, int, int, StepCounts, tuple[tuple[int, int], ...]]


def _counted(steps: Sequence[DecodeStep], b: int) -> _Counts:
    """Tokens, steps, accepted, offered and tokens in loops of row b behind the prompt's own step,
    its steps outside of loops, and what became of drafts by depth."""
    looped = in_loops([token for step in steps for token in step.emitted[b]])
    later = [step for step in steps[1:] if step.active[b]]
    counts = DraftCounts()
    for step in later:
        counts.add_step(step, b)
    return (
        sum(len(step.emitted[b]) for step in later),
        len(later),
        sum(step.accepted[b] for step in later),
        sum(step.offered_depth[b] for step in later),
        int(looped[len(steps[0].emitted[b]) :].sum()),
        count_outside(steps, b, looped),
        tuple(counts.by_position),
    )


@cache
def loop_shares(exam: Evaluation) -> dict[str, float]:
    """By temperature: the share of the target's own tokens that lie in repetition loops. At
    temperature 0 these are the texts of all drafters."""
    target = _target(exam.target)
    prompts = [prompt.token_ids(target.tokenizer) for prompt in exam.read()]
    found = {}
    for temperature in exam.temperatures:
        plain = count(exam, target, NoDrafter(), prompts, TreeShape(), temperature)
        found[f"{temperature:g}"] = plain.around_loops["loop_share"]
    return found


def greedy_texts(exam: Evaluation, model: HFTarget, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What a model says by itself."""
    out: list[list[int]] = [[] for _ in prompts]
    options = DecodeOptions(max_new_tokens=exam.max_new_tokens)
    for rows in batches(prompts, exam.batch_size):
        chosen = [prompts[row] for row in rows]
        for step in decode(model, NoDrafter(), chosen, options):
            for row, new in zip(rows, step.emitted, strict=True):
                out[row].extend(new)
    return [model.tokenizer.decode(text, skip_special_tokens=True) for text in out]


def quality(prompts: Sequence[Prompt], texts: Sequence[str]) -> tuple[float | None, float | None]:
    """(chrF, BLEU) against the references; None without any, or without sacrebleu."""
    pairs = [(t, p.reference[0]) for p, t in zip(prompts, texts, strict=True) if p.reference]
    try:
        import sacrebleu
    except ImportError:
        return None, None
    if not pairs:
        return None, None
    said, wanted = [text for text, _ in pairs], [[reference for _, reference in pairs]]
    units = UNITS.get(prompts[0].language or "", "13a")
    bleu = sacrebleu.corpus_bleu(said, wanted, tokenize=units)
    return sacrebleu.corpus_chrf(said, wanted).score, bleu.score


def batches(prompts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Rows of like lengths side by side."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> Path:
    """A prompt file, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"id": p.id, "prompt": p.text}) + "\n" for p in prompts)
        write_text_atomic(path, "".join(lines))
    return path


@cache
def _target(folder: str) -> HFTarget:
    return load_target(folder)


@cache
def _texts(exam: Evaluation, temperature: float) -> list[Trajectory]:
    """The target's own continuations; a worker draws them once."""
    target = _target(exam.target)
    requests = [
        CollectRequest(prompt_id=prompt.id, prompt=prompt.token_ids(target.tokenizer))
        for prompt in exam.read()
    ]
    settings = CollectSettings(
        forcing="sample",
        temperatures=(temperature,),
        top_p=exam.sampler(temperature).top_p,
        max_new_tokens=exam.max_new_tokens,
        top_k=1,
        seed=exam.seed + 1,
    )
    return TransformersBackend(target, batch_size=exam.batch_size).collect(requests, settings)
