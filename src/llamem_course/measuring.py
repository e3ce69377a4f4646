"""What notebooks 00 and 02 measure: a model's layers by their shapes, and what a step really occupies here."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from flax import nnx

from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.llama.plan import Plan


def abstract_layers(config: LlamaConfig, plan: Plan, tokens: int) -> tuple[Callable[..., Any], Any, Any]:
    """Return the layers of a model as a function of its parameters and tokens, and the shapes of both.

    The function returns what the last layer does, after its norm. One sequence; nothing is computed.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=plan)))

    def layers(params: Any, tokens_BT: Any) -> Any:
        return nnx.merge(graphdef, params).hidden(tokens_BT)

    return layers, params, jax.ShapeDtypeStruct((1, tokens), jnp.int32)


def planned_and_measured(step: Callable[..., Any], *shapes: Any) -> tuple[int, int]:
    """Compile a step for this machine and run it on zeros; return the bytes of its plan, and the most in use.

    Its first argument is donated.
    """
    compiled = jax.jit(step, donate_argnums=(0,)).lower(*shapes).compile()
    plan: Any = compiled.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    planned += plan.output_size_in_bytes - plan.alias_size_in_bytes

    def run() -> None:
        arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        jax.block_until_ready(compiled(*arrays))

    return planned, most_memory(run)


def most_memory(step: Callable[[], Any]) -> int:
    """Return the most bytes in use while `step()` runs: of the device, or else what this process adds.

    A GPU or TPU counts its own bytes. On a CPU the process's resident memory is looked at once a millisecond, less what
    was there before.
    """
    device = jax.local_devices()[0]
    if device.memory_stats():
        step()
        return device.memory_stats()["peak_bytes_in_use"]
    process, done = psutil.Process(), threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(process.memory_info().rss)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return max(seen, default=before) - before
