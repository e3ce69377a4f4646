#!/usr/bin/env bash
# Llama on a pod of 256 v5e chips, 64 hosts: NAME=llamem ZONE=us-east1-c NFS=10.0.0.2:/runs scale/tpu_vms.sh
# The hosts find each other by themselves. Run it again after a host was lost: what exists is used again.
set -euo pipefail
: "${NAME:?a name for the TPU}" "${ZONE:?where}" "${NFS:?server:/share of a Filestore that all hosts mount}"
REPOSITORY=${REPOSITORY:-https://github.com/llamem/llamem}
vm() { gcloud compute tpus tpu-vm "$1" "$NAME" --zone="$ZONE" "${@:2}"; }
vm describe >/dev/null 2>&1 || vm create --accelerator-type=v5litepod-256 --version=v2-alpha-tpuv5-lite
everywhere() { vm ssh --worker=all --command="set -e; $1"; }
everywhere "
  mountpoint -q /runs || { sudo apt-get install -yq nfs-common && sudo mkdir -p /runs && sudo mount -t nfs '$NFS' /runs; }
  test -d llamem || git clone -q '$REPOSITORY' llamem
  cd llamem && python3 -m venv .venv
  .venv/bin/pip install -q 'jax[tpu]' -e '.[notebooks,lab,train]'"
everywhere "
  cd llamem && LLAMEM_CLUSTER=auto .venv/bin/python -u scale/train.py \
    --preset llama3.1-8b --mesh fsdp=256 --batch-size 256 --seq-len 8192 \
    --steps 10000 --warmup-steps 200 --eval-every 500 --snapshot-every 500 \
    --output '/runs/$NAME' --report"
echo "Delete it when you are done: gcloud compute tpus tpu-vm delete $NAME --zone=$ZONE"
