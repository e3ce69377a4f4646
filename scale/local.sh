#!/usr/bin/env bash
# Several hosts on one machine, for practice: scale/local.sh HOSTS ARGUMENTS OF scale/train.py
# With LLAMEM_DEVICES=4 each of them simulates four devices on its CPU. It ends with the status of scale/train.py: 2 where
# a host was refused, 75 where they were interrupted and have saved. SIGTERM, to this process or to its group, saves.
set -euo pipefail
hosts=$1; shift
export LLAMEM_COORDINATOR="127.0.0.1:${LLAMEM_PORT:-8476}" LLAMEM_NUM_HOSTS=$hosts
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="${LLAMEM_DEVICES:-1}"
processes=()
for ((host = 0; host < hosts; host++)); do
  # Labels outlive a signal to the group: what a host says while it saves needs a reader.
  LLAMEM_HOST=$host "${PYTHON:-python3}" -u "$(dirname "$0")/train.py" "$@" \
    > >(trap '' TERM INT; exec sed -u "s/^/[host $host] /") 2>&1 &
  processes+=($!)
done
# A second SIGTERM would end a host at once. So it is handed on only where the group was not told, which this one tells.
sleep 100000000 >/dev/null 2>&1 &
in_the_group=$!
trap 'kill "$in_the_group" 2>/dev/null || true' EXIT
stop() {
  told=1
  sleep 0.3
  if kill -0 "$in_the_group" 2>/dev/null; then kill -TERM "${processes[@]}" 2>/dev/null || true; fi
}
trap stop TERM
trap 'told=1' INT # from a terminal, and so to the whole group
worst=0
for process in "${processes[@]}"; do
  while true; do
    told="" status=0
    wait "$process" || status=$?
    if [ -z "$told" ]; then break; fi # else the signal ended the wait, and not the host
  done
  case $status in
    0) ;;
    2) worst=2 ;;
    75) if [ $worst -eq 0 ]; then worst=75; fi ;;
    *) if [ $worst -ne 2 ]; then worst=$status; fi ;;
  esac
done
exit $worst
