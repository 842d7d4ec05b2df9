"""The flags of every verb, frozen: a change here is a change for users. See CHANGELOG.md."""

from __future__ import annotations

import contextlib
import io
import re
from functools import lru_cache

import pytest

from draftsmith import cli
from draftsmith.config import flags_of

EXPECTED = {
    "quickstart": """
        --debug --json --limit --max-new-tokens --models --out --seed --temperature
    """,
    "chat": """
        --acceptance --attn-implementation --debug --device --draft-length --draft-proposal
        --draft-tree --drafter --drafter-option --dtype --fixed-width --frequency-penalty --json
        --logit-bias --max-new-tokens --min-p --no-compile --presence-penalty --repetition-penalty
        --revision --rule --seed --system --target --temperature --top-k --top-p --trust-remote-code
        --weights
    """,
    "generate": """
        --acceptance --attn-implementation --batch-size --debug --device --draft-length
        --draft-proposal --draft-tree --drafter --drafter-option --dtype --fixed-width
        --frequency-penalty --json --limit --logit-bias --max-new-tokens --min-p --no-compile
        --presence-penalty --prompt --prompts --raw --repetition-penalty --revision --rule --seed
        --stop --stream --target --temperature --top-k --top-p --trust-remote-code --weights
    """,
    "bench": """
        --acceptance --attn-implementation --batch-size --debug --device --draft-length
        --draft-proposal --draft-tree --drafter --drafter-option --dtype --fixed-width
        --frequency-penalty --json --limit --logit-bias --max-new-tokens --min-p --no-compile
        --no-hf-baseline --out --perplexity --presence-penalty --repeats --repetition-penalty
        --revision --rule --seed --suite --target --temperature --top-k --top-p --trust-remote-code
        --warmup --weights
    """,
    "tune": """
        --acceptance --attn-implementation --batch-sizes --debug --device --draft-length
        --draft-proposal --draft-tree --drafter --drafter-option --dtype --fixed-width
        --frequency-penalty --json --limit --logit-bias --longest --max-new-tokens --min-p
        --no-compile --out --presence-penalty --repetition-penalty --revision --rule --seed --suite
        --target --temperature --top-k --top-p --trust-remote-code --weights
    """,
    "doctor": """
        --debug --json
    """,
    "pretrain": """
        --batch-tokens --betas --block-length --clip-norm --clip-value --context --debug
        --decay-share --deepspeed --dtype --duration --eval-every --eval-text --exclude
        --gradient-accumulation --gradient-checkpointing --heads --hidden --hold-out --include
        --init --intermediate --json
        --kv-heads --layers --learning-rate --long-block-length --long-share --min-learning-rate
        --no-attend-across-documents --out --parallel --report-to --save-dtype --save-every
        --schedule --seed --size --text --tokenizer --vocab-size --vocab-subset --warmup
        --weight-decay
    """,
    "collect": """
        --attn-implementation --backend --batch-size --beams --debug --device --dtype --features
        --fixed-width --gold --json --length-penalty --limit --mass-gain --max-beams --max-bytes
        --max-new-tokens --no-compile --on-bad-prompt --out --prompts --ray --revision --samples
        --seed --shard-size --system --target --temperatures --top-k --top-p --trust-remote-code
        --weights --workers
    """,
    "distill": """
        --aggregate --batch-tokens --beam-weights --beams --beta --betas --block-length --clip-norm
        --clip-value --debug --decay-share --deepspeed --drafter --drafter-option --dtype --duration
        --eval-every --evaluate
        --feature-weight --gradient-accumulation --gradient-checkpointing --hold-out --json --laws
        --learning-rate --long-block-length --long-share --long-texts --max-new-tokens --mean-over
        --min-learning-rate --objective --on-bad-prompt --on-bad-shard --on-policy --one-per-block
        --online --out --parallel --prompts --prompts-per-step --reading
        --report-to --save-dtype --save-every --schedule --score-temperature --seed --store --tail
        --target --teacher-temperature --text --text-logprobs --text-share --token-weight --top-k
        --top-weight --warmup --weight-decay
    """,
    "report": """
        --base --debug --json --out --runs
    """,
    "live translate": """
        --agree --attn-implementation --bias --context --debug --device --dtype --final-bias
        --fixed-width --format --json --language --mask-k --max-ratio --min-common --no-compile
        --no-shrink --out --resync --revision --revision-bias --target --template --then
        --trim-full-stop --trust-remote-code --unit --weights --whole-words
    """,
    "live make-stream": """
        --debug --json --lag --limit --out --references --rewrites --seed --source --unit
    """,
    "live replay": """
        --attn-implementation --bias --compare --context --debug --device --dtype --final-bias
        --fixed-width --json --language --limit --mask --mask-k --max-ratio --min-common
        --no-compile --out --resync --revision --revision-bias --stream --target --template --then
        --trim-full-stop --trust-remote-code --weights
    """,
    "live serve": """
        --agree --allow-origin --attn-implementation --bias --context --debug --device --dtype
        --final-bias --fixed-width --host --json --keep-seconds --language --mask-k --max-ratio
        --min-common --no-compile --per-address --port --resync --revision --revision-bias
        --sessions --target --template --then --token --trim-full-stop --trust-remote-code --unit
        --weights --whole-words
    """,
    "live make-examples": """
        --debug --form --json --language --limit --out --pairs --prefixes --seed --source-unit
        --target-unit --template
    """,
    "live score": """
        --comet --debug --json --language --out --records --source-language --stream --texts
    """,
    "plan law": """
        --debug --fixed-effects --json --observations --out --predict --protocol
    """,
    "plan optimum": """
        --coefficients --cost-floor --cost-ratio --debug --draft-params --draft-tokens --integer
        --json --law --loss --out --target-params --target-tokens
    """,
    "plan sweep": """
        --coefficients --debug --grid --json --law --loss --out
    """,
    "plan alpha": """
        --counts --debug --draft --json --out
    """,
    "plan fit": """
        --bootstrap --debug --json --out --runs --seed
    """,
    "plan table": """
        --debug --json --number --out
    """,
    "plan ladder": """
        --coefficients --cost-floor --debug --eval-text --flops --hours --json --law --loss --out
        --prompts --suite --target --target-params --target-tokens --text --tokens
        --tokens-per-second --vocab-size
    """,
    "plan check": """
        --debug --json --out --predictions --records
    """,
}


def test_the_verbs_are_these() -> None:
    assert sorted(cli.verbs()) == sorted(EXPECTED)


@pytest.mark.parametrize("verb", list(cli.verbs()))
def test_the_flags_are_these(verb: str) -> None:
    flags = sorted(flags_of(cli.verbs()[verb]))
    new = sorted(set(flags) - set(EXPECTED.get(verb, "").split()))
    gone = sorted(set(EXPECTED.get(verb, "").split()) - set(flags))
    assert not new, f"new flags of {verb}: add them here and to CHANGELOG.md: {' '.join(new)}"
    assert not gone, f"flags of {verb} are gone: users may depend on them: {' '.join(gone)}"


@lru_cache
def help_of(verb: str) -> list[str]:
    """The lines of `draftsmith VERB --help`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        cli.main([*verb.split(), "--help"])
    assert end.value.code == 0
    return [line.strip("│| ") for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("verb", list(cli.verbs()))
def test_the_parser_has_exactly_these_flags(verb: str) -> None:
    """`flags_of` lists without tyro what tyro makes of the options: they must agree."""
    shown = {line.split()[0] for line in help_of(verb) if re.match("--[a-z]", line)}
    assert shown == set(flags_of(cli.verbs()[verb]))


@pytest.mark.parametrize("verb", list(cli.verbs()))
def test_every_flag_says_what_it_does(verb: str) -> None:
    text = " ".join(help_of(verb))
    for name in flags_of(cli.verbs()[verb]):
        entry = text.split(f"{name} ", 1)[1].split("(default" if "(default" in text else "--", 1)[0]
        assert len(entry.split()) >= 3, f"{verb} {name} has no help"
