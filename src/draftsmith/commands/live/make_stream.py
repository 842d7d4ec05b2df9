"""`draftsmith live make-stream`: sentences as a recogniser would send them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Leading, each_at_least, require_another
from draftsmith.core.config import check_seed
from draftsmith.data.text import sentences
from draftsmith.live.config import check_stream
from draftsmith.live.records import write_lines


@dataclass(frozen=True, kw_only=True)
class LiveMakeStreamOptions(VerbOptions):
    """Turn sentences into streams of growing prefixes, as a recogniser would send them."""

    source: Annotated[Path, Leading]
    """Sentences, one per line, also .gz and .xz."""
    references: Path | None = None
    """Their translations, one per line."""
    lag: int = 3
    """Words by which a hypothesis grows."""
    unit: Literal["word", "char"] = "word"
    """char: for languages without blanks."""
    rewrites: float = 0.0
    """Chance that a hypothesis first comes with its last words wrong."""
    limit: int | None = None
    """Use only the first sentences."""
    seed: int = 0
    """Keys the rewrites."""
    out: Path = Path("runs/stream.jsonl")
    """The stream: a JSON object per line."""

    def validate(self) -> None:
        super().validate()
        check_stream(self.lag, self.rewrites)
        each_at_least(1, self, "limit")
        check_seed(self.seed, "--seed")
        require_another(self.out, source=self.source, references=self.references)


def run(options: LiveMakeStreamOptions) -> dict[str, Any]:
    """Write the stream."""
    from draftsmith.live.streams import make_stream

    made = make_stream(
        sentences(options.source, options.limit),
        None if options.references is None else sentences(options.references, options.limit),
        lag=options.lag,
        unit=options.unit,
        rewrites=options.rewrites,
        seed=options.seed,
    )
    write_lines(options.out, made)
    segments = made[-1].seg + 1
    note = f"wrote {options.out}: {segments} segments, {len(made)} updates"
    Console(highlight=False, markup=False, soft_wrap=True).print(note)
    return {"out": str(options.out), "segments": segments, "updates": len(made)}
