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

say "model, own text and its routing"
("$PYTHON" -m tools.demo_model.sparse.build "$WORK/checkpoint"
    seqmoe convert "$WORK/checkpoint" "$WORK/model" > "$OUT/convert.txt") &
MODEL=$!
"$PYTHON" -m tools.demo_model.sparse.routes --tokens "$TOKENS" --rows "$ROWS" \
    --length "$LENGTH" --hidden "$HIDDEN" $COMPILE --out "$WORK/own.trace"
wait $MODEL
say "training; the recall is judged beside what follows"
seqmoe train "$WORK/model" --trace "$WORK/own.trace" --minutes "$MINUTES" --json \
    --checkpoint "$WORK/training" --held-out "$WORK/held.trace" -o "$WORK/predictor.safetensors" \
    > "$OUT/recall.json" &
TRAINING=$!
while [ ! -s "$WORK/predictor.safetensors" ] && kill -0 $TRAINING; do sleep 1; done
cp "$WORK/predictor.safetensors" "$OUT/predictor.safetensors"
say "what it is worth in the simulator, beside the rest"
for name in none predictor; do
    flag=$([ $name = none ] || echo "--predictor $OUT/predictor.safetensors")
    # shellcheck disable=SC2086
    for way in "lru,decayed,forecast,belady --prefetch off" "forecast --prefetch lookahead,full"; do
        CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=2 "$PYTHON" -m tools.simulator "$WORK/held.trace" --tokens 2500 \
            --skip "$SKIP" --pool 25%,45% -o jsonl --policy $way --forecast $name $flag \
            > "$OUT/worth_${name}_${way##* }.jsonl" &
    done
done
say "times of a step; the levels, each beside the one below it"
"$PYTHON" benchmarks/predictor_step.py "$OUT/predictor.safetensors" > "$OUT/step.json"
"$PYTHON" benchmarks/predictor_step.py > "$OUT/step_qwen3.json"
seqmoe bench "$WORK/model" --predictor "$OUT/predictor.safetensors" -p 0 -n 256 -r 1 -o jsonl \
    --pool all,45%,25% --policy lru,decayed,forecast --prefetch off,lookahead,full > "$OUT/levels.jsonl"
cat "$OUT/step.json" "$OUT/step_qwen3.json" "$OUT/levels.jsonl"
say "recall and simulations"
wait
CUDA_VISIBLE_DEVICES='' "$PYTHON" -m tools.simulator.recall "$WORK/own.trace" --json \
    --predictor "$WORK/predictor.safetensors" > "$OUT/recall_closely.json"
cp "$WORK/predictor.safetensors" "$OUT/predictor.safetensors"
say "done"
