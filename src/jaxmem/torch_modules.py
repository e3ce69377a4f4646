"""PyTorch in, memory out: a torch module as a JAX function, by torchax. Neither is imported before it is asked for."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.common.checks import show


def from_torch(
    module: Any, forward: Callable[..., Any] | None = None
) -> tuple[Callable[..., Any], dict[str, jax.ShapeDtypeStruct]]:
    """Return a torch module as a JAX function of its parameters, and their shapes: what `compile_report` takes.

    The function is called with a dict of parameters by name, as in `module.named_parameters()` (tied ones once), then
    with what `forward(module, ...)` takes, in torch's words: for training, what computes the loss, such as
    `lambda model, ids: model(input_ids=ids, labels=ids).loss`. Without it, it is the module's own. Arrays come out,
    for `jax.grad` and `jax.checkpoint`. Parameters with `requires_grad=False` are among them: split the dict.

    `module` may be on the meta device, where nothing is allocated: `with torch.device("meta"): model = ...`. Buffers
    are part of the program: their values, or zeros on meta. What a forward pass writes into them is dropped. Dropout
    draws with one fixed key, the same at each call.

    torch's autograd is not at work: `torch.no_grad()` stops no gradient here (`.detach()` does), and
    `torch.utils.checkpoint`, `gradient_checkpointing_enable()` included, frees nothing: wrap layers in
    `jax.checkpoint`. The peak is of the program that XLA makes, as for torch on TPUs, not of eager mode on CUDA.

    Tried with torchax 0.0.13, torch 2.13.0, transformers 5.23.0. Raises ImportError where torch or torchax is missing,
    TypeError for what is no torch module, and what torchax raises where it does not know an operation.
    """
    try:
        torch = importlib.import_module("torch")
        with _names_that_went(torch):
            env = importlib.import_module("torchax").default_env()
    except ImportError as error:
        raise ImportError(
            f"from_torch needs PyTorch and torchax, which hands its operations to JAX ({error}). Install both: "
            "`pip install torch torchax`."
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"from_torch({show(module)}): expected a torch.nn.Module, such as one made under torch.device('meta')."
        )
    interop, mappings = (importlib.import_module(f"torchax.{name}") for name in ("interop", "ops.mappings"))

    class Whole(torch.nn.Module):
        """The module inside another one, so that `forward` may be any function of it."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs) if forward is None else forward(module, *args, **kwargs)

    def dtype_of(tensor: Any) -> Any:
        return jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype))

    def buffer(tensor: Any) -> jax.Array:
        if tensor.device.type != "meta":
            return mappings.t2j(tensor.detach(), use_dlpack=False)
        # Behind a barrier: a compiler that knew the zeros would compute with them and leave out what follows.
        return jax.lax.optimization_barrier(jnp.zeros(tuple(tensor.shape), dtype_of(tensor)))

    whole = Whole()

    def call(params: dict[str, jax.Array], *args: Any, **kwargs: Any) -> Any:
        state = {name: buffer(tensor) for name, tensor in whole.named_buffers()}
        state |= {f"module.{name}": array for name, array in params.items()}
        with env, torch.device("jax:0"), env.override_property(prng=jax.random.key(0)):
            state, args, kwargs = interop.torch_view((state, args, kwargs))
            return interop.jax_view(torch.func.functional_call(whole, state, args, kwargs))

    return call, {name: jax.ShapeDtypeStruct(tuple(p.shape), dtype_of(p)) for name, p in module.named_parameters()}


@contextlib.contextmanager
def _names_that_went(torch: Any) -> Iterator[None]:
    """Let torchax 0.0.13 name, while it is imported, operations on named tensors, which torch 2.13 has no more."""
    packet = type(torch.ops.aten.add)
    found = packet.__getattr__

    def get(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if "imname" in name or "names" in name:
                return object()
            raise

    packet.__getattr__ = get
    try:
        yield
    finally:
        packet.__getattr__ = found
