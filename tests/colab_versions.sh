#!/usr/bin/env bash
# All tests and notebooks at the versions that a Colab runtime holds, in an environment of their own.
#
#     tests/colab_versions.sh [PYTHON]          # Colab's versions; PYTHON is python3.13 unless told
#     tests/colab_versions.sh [PYTHON] latest   # the newest of everything instead
#
# First the notebooks' own way in: with Colab's packages installed, their first cell's pip command runs, a wheel of this
# checkout in place of the address, and what was installed before must be as it was. Then all notebooks, the tests, and
# all notebooks once more, with a compiler for TPUs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3.13}
which=${2:-colab}
folder=build/versions-$which
pins=(jax==0.7.2 jaxlib==0.7.2 flax==0.11.2 optax==0.2.8 numpy==2.1.3 matplotlib==3.10.0 ipywidgets==7.7.1
      ipython==7.34.0 ipykernel==6.17.1)
compiler=libtpu==0.0.23.*
if [ "$which" = latest ]; then
  pins=(jax flax optax numpy matplotlib ipywidgets ipython ipykernel)
  compiler=libtpu
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

# Stored text belongs to the locked versions: here every cell must only run.
run_notebooks() {
  rm -rf "$folder/notebooks"
  cp -r notebooks "$folder/notebooks"
  sed -i 's/"nbval-check-output"/"nbval-only-run"/' "$folder"/notebooks/*.ipynb
  JAX_PLATFORMS=cpu "$folder/bin/python" -m pytest -n 2 --dist loadfile -o addopts="" --nbval-lax --nbval-current-env \
    --nbval-cell-timeout=900 -p no:python "$folder/notebooks"
}
# As a reader's first cell leaves things: from the wheel, with no compiler for chips that are not there.
"${pip[@]}" install pytest pytest-xdist nbval "${pins[@]}"
run_notebooks

# From here on this checkout itself, for its tests, and a compiler for TPUs.
"${pip[@]}" install --editable '.[notebooks,train,tpu-compile,test]' "${pins[@]}" "$compiler"
"$folder/bin/python" -m pip freeze | grep -iE '^(jax|jaxlib|flax|optax|numpy|matplotlib|ipywidgets|ipython|libtpu)=='
"$folder/bin/python" --version
# What other versions of other packages deprecate is no fault of this one.
"$folder/bin/python" -m pytest -n 2 --dist loadfile -W ignore::DeprecationWarning
run_notebooks
