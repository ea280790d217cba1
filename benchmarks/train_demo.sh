#!/bin/sh
# The predictor of the sparse demo model, on a GPU: its own text in batches, training, recall, and what
# the predictor is worth to a pool. Needs SMOLLM2_GGUF and the package gguf; PYTHON, OUT, TOKENS,
# ROWS, LENGTH, COMPILE, MINUTES, SKIP and HIDDEN may be set. Results go to OUT.
#
#   OUT=results sh benchmarks/train_demo.sh
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} OUT=${OUT:-results} TOKENS=${TOKENS:-2000000} MINUTES=${MINUTES:-4}
HIDDEN=${HIDDEN:-0} SKIP=${SKIP:-500} ROWS=${ROWS:-2048} LENGTH=${LENGTH:-512} COMPILE=${COMPILE---compile}
WORK=$(mktemp -d)
export PYTHONPATH=.:kernels:weights${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"
seqmoe() { "$PYTHON" -m seqmoe_cli "$@"; }
say() { echo "== $(date +%T) $*"; }

say "own text and its routing"
"$PYTHON" -m tools.demo_model.sparse.routes --tokens "$TOKENS" --rows "$ROWS" \
    --length "$LENGTH" --hidden "$HIDDEN" $COMPILE --out "$WORK/own.trace"
say "model"
"$PYTHON" -m tools.demo_model.sparse.build "$WORK/checkpoint"
seqmoe convert "$WORK/checkpoint" "$WORK/model" > "$OUT/convert.txt"
say "training"
seqmoe train "$WORK/model" --trace "$WORK/own.trace" --minutes "$MINUTES" --json \
    --checkpoint "$WORK/training" --held-out "$WORK/held.trace" -o "$OUT/predictor.safetensors" \
    > "$OUT/recall.json"
"$PYTHON" benchmarks/predictor_step.py "$OUT/predictor.safetensors" > "$OUT/step.json"
"$PYTHON" benchmarks/predictor_step.py > "$OUT/step_qwen3.json"
say "what it is worth"
for forecast in none "predictor --predictor $OUT/predictor.safetensors"; do
    # shellcheck disable=SC2086
    seqmoe simulate "$WORK/held.trace" --tokens 2500 --skip "$SKIP" --pool 25%,45% -o jsonl \
        --policy lru,decayed,forecast,belady --forecast $forecast
    # shellcheck disable=SC2086
    seqmoe simulate "$WORK/held.trace" --tokens 2500 --skip "$SKIP" --pool 25%,45% -o jsonl \
        --policy forecast --prefetch lookahead,full --forecast $forecast
done > "$OUT/worth.jsonl"
say "done"
cat "$OUT/step.json" "$OUT/step_qwen3.json"
