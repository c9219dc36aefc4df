#!/usr/bin/env bash
# From nothing to a trained model, without a GPU: sets up .venv, makes a corpus of the Python standard library's own
# source files, and trains a small Qwen3-MoE on it with four processes. Writes runs/quickstart; arguments go to
# scripts/pretrain_gpt.py (for example --train-iters 10).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

out=runs/quickstart
rm -rf "$out"
stdlib=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
.venv/bin/python scripts/prepare_corpus.py --input "$stdlib" --extensions .py \
  --exclude site-packages test tests idle_test --append-eod --valid-fraction 0.03 --output-prefix "$out/stdlib"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/torchrun --standalone --nproc-per-node 4 scripts/pretrain_gpt.py --recipe recipes/tiny_cpu.yaml \
  --data-path "$out/stdlib" --valid-data-path "$out/stdlib_valid" --output-dir "$out" "$@"
