#!/usr/bin/env bash
# Two hosts of one run, each in a network namespace of its own, joined by a virtual cable: they share no loopback.
# hosts_in_namespaces.sh PYTHON HOST_RUN.PY FOLDER. Exit status 77 where the rights for it are missing.
set -euo pipefail
python=$1 program=$2 folder=$3
a="llamem-a-$$" b="llamem-b-$$"
ip netns add "$a" 2>/dev/null || { echo "no right to make network namespaces" >&2; exit 77; }
trap 'ip netns del "$a"; ip netns del "$b"; rm -rf "/etc/netns/$a" "/etc/netns/$b"' EXIT
ip netns add "$b"
ip link add name "va$$" netns "$a" type veth peer name "vb$$" netns "$b" || { echo "no virtual cables here" >&2; exit 77; }
ip -n "$a" addr add 10.77.0.1/24 dev "va$$"
ip -n "$b" addr add 10.77.0.2/24 dev "vb$$"
for side in "$a va$$" "$b vb$$"; do
  set -- $side
  ip -n "$1" link set lo up
  ip -n "$1" link set "$2" up
done
# Gloo listens where a host's own name leads, so the name must lead to an address that the other host reaches.
mkdir -p "/etc/netns/$a" "/etc/netns/$b" || { echo "no right to give a namespace its own /etc/hosts" >&2; exit 77; }
echo "10.77.0.1 $(hostname)" >"/etc/netns/$a/hosts"
echo "10.77.0.2 $(hostname)" >"/etc/netns/$b/hosts"
asked() { echo "{\"folder\": \"$folder\", \"address\": \"10.77.0.1\", \"port\": 8476, \"hosts\": 2, \"host\": $1}"; }
ip netns exec "$a" "$python" "$program" "$(asked 0)" >"$folder/host0" &
first=$!
ip netns exec "$b" "$python" "$program" "$(asked 1)" >"$folder/host1"
wait "$first"
