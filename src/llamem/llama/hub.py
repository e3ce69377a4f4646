"""Models of the Hugging Face hub: the files of one, in a folder of this machine."""

import os
from pathlib import Path

from llamem._extras import import_extra

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
