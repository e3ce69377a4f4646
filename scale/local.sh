#!/usr/bin/env bash
# Several hosts on one machine, for practice: scale/local.sh HOSTS ARGUMENTS OF scale/train.py
# With LLAMEM_DEVICES=4 each of them simulates four devices on its CPU.
set -euo pipefail
hosts=$1; shift
export LLAMEM_COORDINATOR="127.0.0.1:${LLAMEM_PORT:-8476}" LLAMEM_NUM_HOSTS=$hosts
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="${LLAMEM_DEVICES:-1}"
processes=()
for ((host = 0; host < hosts; host++)); do
  LLAMEM_HOST=$host "${PYTHON:-python3}" -u "$(dirname "$0")/train.py" "$@" > >(sed -u "s/^/[host $host] /") 2>&1 &
  processes+=($!)
done
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
exit $failed
