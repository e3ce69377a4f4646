#!/usr/bin/env bash
# Llama on one node of eight GPUs, without a scheduler: RUN=/data/runs/one scale/node.sh
# One process drives all eight. Arguments, for scale/train.py, stand in the place of those below:
# RUN=/data/runs/one scale/node.sh --plan plan.json. Ctrl-C and SIGTERM save; the same command goes on. To start it again
# after a loss, and not where it was refused (2) or told to stop (75):
# until RUN=/data/runs/one scale/node.sh; do case $? in 2 | 75) break ;; esac; sleep 30; done
set -euo pipefail
: "${RUN:?give RUN=, a folder on a disk of this node}"
cd "$(dirname "$0")/.."
if [ $# -gt 0 ]; then exec "${PYTHON:-.venv/bin/python}" -u scale/train.py --output "$RUN" "$@"; fi
exec "${PYTHON:-.venv/bin/python}" -u scale/train.py \
  --preset llama3.1-8b --mesh fsdp=8 --batch-size 8 --seq-len 8192 \
  --steps 10000 --warmup-steps 200 --eval-every 500 --snapshot-every 500 \
  --output "$RUN" --report
