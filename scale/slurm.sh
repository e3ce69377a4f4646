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
# SLURM starts the job again after the loss of a node; the last lines do after whatever else ended it too early.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
: "${RUN:?give RUN=, a folder that all nodes see}"
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
# Proxies stand between the processes on some clusters.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
set +e
srun --kill-on-bad-exit=1 --label .venv/bin/python -u scale/train.py \
  --preset llama3.1-8b --mesh fsdp=32 --batch-size 64 --seq-len 8192 \
  --steps 10000 --warmup-steps 200 --eval-every 500 --snapshot-every 500 \
  --output "$RUN" --report
status=$?
# 0: finished. 2: refused what it was asked for, as it would again. Else it goes on from its newest snapshot.
if [ $status -ne 0 ] && [ $status -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-20}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
