#!/usr/bin/env bash
# The demo: a plan for a large cluster, a plan for this machine, 30 training steps with it, generated text.
set -euo pipefail
bin=$1 model=$2

say() { printf '\n\033[1m== %s\033[0m\n' "$1"; }

say "A plan for Llama-3.1-8B on 64 H100 (nothing is allocated)"
"$bin/autopar" plan llama-3.1-8b --cluster h100:8x8 --batch 128 --seq 8192 --quiet

say "A plan for SmolLM2-135M on 4 processes of this machine"
"$bin/autopar" plan "$model" --cluster cpu:4 --batch 4 --seq 48 --quiet -o .cache/demo-plan.json

say "30 training steps with that plan, on 4 processes"
"$bin/autopar" train "$model" --plan .cache/demo-plan.json --steps 30 --lr 1e-4 --quiet

say "Text, greedily, from the model split over 2 processes"
"$bin/autopar" generate "$model" "The capital of France is" --max-new-tokens 24 --processes 2 --quiet
