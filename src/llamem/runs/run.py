"""What a run returns, and the folder that others read: weights or adapters, their tokenizer, a card."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmem.files import whole_folder
from llamem.adapters.lora import Adapters, merge_adapter
from llamem.files.peft import save_adapter
from llamem.files.pretrained import save_pretrained
from llamem.llama.model import Llama
from llamem.quantized.model import dequantize, is_quantized
from llamem.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: the model, its metrics (one dict per step), whether it reached its end, and the adapters it trained.

    `described`: data, settings and plan in words, for the card.
    """

    model: Llama
    metrics: list[dict[str, Any]]
    finished: bool
    adapters: Adapters | None = None
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def save(
        self, folder: str | os.PathLike, tokenizer: Tokenizer | None = None, *, merge: bool = False, base: str = ""
    ) -> Path:
        """Write a Hugging Face folder of what was trained, with a card, and return it.

        The model's weights as `transformers` reads them, or the adapters as `peft` does: one in the folder, several in
        `adapter_0`, `adapter_1` .. inside it. `tokenizer`: written beside them. `merge`: the one adapter added into the
        weights, which blocks of four or eight bits leave for that. `base`: the hub name or folder that the adapters
        name as their base.

        The folder appears when all of it is written. Raise FileExistsError where it exists and is not empty, ValueError
        for `merge` without exactly one adapter.
        """
        folder, count = Path(folder), 0 if self.adapters is None else self.adapters.count
        if merge and count != 1:
            raise ValueError(
                f"save(merge=True): one adapter can be added into the weights, and this run has {count}. Choose one: "
                "llamem.save_pretrained(llamem.merge_adapter(run.model, run.adapters, 0), folder)."
            )
        with whole_folder(folder) as unfinished:
            if self.adapters is None or merge:
                save_pretrained(self._merged() if merge else self.model, unfinished)
            for i in range(0 if merge else count):
                assert self.adapters is not None
                save_adapter(self.adapters, i, unfinished if count == 1 else unfinished / f"adapter_{i}", base=base)
            if tokenizer is not None:
                tokenizer.save(unfinished)
            (unfinished / "README.md").write_text(self._card(folder.name, base, merge), encoding="utf-8")
        return folder

    def _merged(self) -> Llama:
        assert self.adapters is not None
        return merge_adapter(dequantize(self.model) if is_quantized(self.model) else self.model, self.adapters, 0)

    def _card(self, name: str, base: str, merge: bool) -> str:
        """Return the folder's README: what Hugging Face's hub reads between the dashes, then a table for people."""
        adapters = self.adapters is not None and not merge
        known = f"base_model: {base}\n" if base else ""
        head = f"---\nlibrary_name: {'peft' if adapters else 'transformers'}\n{known}tags: [llamem]\n---\n"
        rows = {"what": "LoRA adapters" if adapters else "weights, adapters added" if merge else "weights"}
        rows |= {**self.described, "base": base or "not named"}
        rows["steps"] = f"{len(self.metrics)}{'' if self.finished else ', not finished'}"
        for key, words in (("loss", "loss"), ("val_loss", "loss on held-out data")):
            values = [row[key] for row in self.metrics if key in row]
            if values:
                rows[words] = f"{values[0]:.4f} at first, {values[-1]:.4f} at last"
        packages = ("llamem", "jax", "flax", "optax")
        rows["versions"] = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
        lines = [f"| {key} | {value.replace('|', '/')} |" for key, value in rows.items()]
        return f"{head}\n# {name}\n\n| | |\n|---|---|\n" + "\n".join(lines) + "\n"
