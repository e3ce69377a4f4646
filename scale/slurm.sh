#!/usr/bin/env bash
# Llama on 4 nodes with 8 GPUs each: RUN=/shared/runs/one sbatch scale/slurm.sh
# JAX reads from SLURM who is who: one process for each GPU. Change the sizes here, and the mesh below with them.
#SBATCH --job-name=llamem
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
# Three minutes before the end every process is told to stop: it saves.
#SBATCH --signal=TERM@180
# After the loss of a node the job starts again, and goes on from its newest snapshot.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
: "${RUN:?give RUN=, a folder that all nodes see}"
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
# Proxies stand between the processes on some clusters.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
srun --kill-on-bad-exit=1 --label .venv/bin/python -u scale/train.py \
  --preset llama3.1-8b --mesh fsdp=32 --batch-size 64 --seq-len 8192 \
  --steps 10000 --warmup-steps 200 --eval-every 500 --snapshot-every 500 \
  --output "$RUN" --report
