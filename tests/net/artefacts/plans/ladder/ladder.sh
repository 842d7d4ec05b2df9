#!/bin/sh
# made by `draftsmith plan ladder`; it may be interrupted and run again
set -eu
: "${TARGET:?folder or hub id of the target}"
: "${TEXT:?what to pre-train on: a file, a folder or a pattern}"
: "${EVAL_TEXT:?held-out text to measure perplexities on}"
: "${PROMPTS:?file of prompts to distil on}"
: "${SUITE:?file of prompts to measure on}"

[ -e plans/ladder/store/run.json ] ||
draftsmith collect --target "$TARGET" --prompts "$PROMPTS" --out plans/ladder/store

[ -e plans/ladder/50m-pretrained/run.json ] ||
draftsmith pretrain --text "$TEXT" --size 50m --tokenizer "$TARGET" --duration 2000000000tokens --learning-rate 0.00069 --out plans/ladder/50m-pretrained

[ -e plans/ladder/50m-distilled/run.json ] ||
draftsmith distill --target "$TARGET" --drafter plans/ladder/50m-pretrained --store plans/ladder/store --out plans/ladder/50m-distilled

[ -e plans/ladder/7x1280-pretrained/run.json ] ||
draftsmith pretrain --text "$TEXT" --layers 7 --heads 10 --hidden 1280 --intermediate 3520 --tokenizer "$TARGET" --duration 2000000000tokens --learning-rate 0.00059 --out plans/ladder/7x1280-pretrained

[ -e plans/ladder/7x1280-distilled/run.json ] ||
draftsmith distill --target "$TARGET" --drafter plans/ladder/7x1280-pretrained --store plans/ladder/store --out plans/ladder/7x1280-distilled

[ -e plans/ladder/8x1792-pretrained/run.json ] ||
draftsmith pretrain --text "$TEXT" --layers 8 --heads 14 --hidden 1792 --intermediate 4928 --tokenizer "$TARGET" --duration 2000000000tokens --learning-rate 0.00049 --out plans/ladder/8x1792-pretrained

[ -e plans/ladder/8x1792-distilled/run.json ] ||
draftsmith distill --target "$TARGET" --drafter plans/ladder/8x1792-pretrained --store plans/ladder/store --out plans/ladder/8x1792-distilled

[ -e plans/ladder/observations/run.json ] ||
draftsmith bench --target "$TARGET" --drafter plans/ladder/50m-pretrained,plans/ladder/50m-distilled,plans/ladder/7x1280-pretrained,plans/ladder/7x1280-distilled,plans/ladder/8x1792-pretrained,plans/ladder/8x1792-distilled --suite "$SUITE" --temperature 0 --perplexity "$EVAL_TEXT" --out plans/ladder/observations --draft-length 1..9

[ -e plans/ladder/50m-bench/run.json ] ||
draftsmith bench --target "$TARGET" --drafter plans/ladder/50m-pretrained,plans/ladder/50m-distilled --suite "$SUITE" --temperature 0 --out plans/ladder/50m-bench --draft-length 8

[ -e plans/ladder/7x1280-bench/run.json ] ||
draftsmith bench --target "$TARGET" --drafter plans/ladder/7x1280-pretrained,plans/ladder/7x1280-distilled --suite "$SUITE" --temperature 0 --out plans/ladder/7x1280-bench --draft-length 7

[ -e plans/ladder/8x1792-bench/run.json ] ||
draftsmith bench --target "$TARGET" --drafter plans/ladder/8x1792-pretrained,plans/ladder/8x1792-distilled --suite "$SUITE" --temperature 0 --out plans/ladder/8x1792-bench --draft-length 6

draftsmith plan check --predictions plans/ladder/ladder.json --records plans/ladder/observations plans/ladder/50m-bench plans/ladder/7x1280-bench plans/ladder/8x1792-bench --out plans/ladder/check
