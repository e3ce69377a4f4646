"""One adapter added into the weights: a plain model, which computes what the adapted one did.

Where a matrix `W` is adapted, `x W` becomes `x W + scale (x A') B`, with `A` `[r, in]` and `B` `[r, out]`.
Source: LoRA (Hu et al. 2021, arXiv 2106.09685); initial values are those of Hugging Face's PEFT.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.common.checks import check_number, check_one_of, check_whole
from llamem.adapters.adapted_weights import IN_LAYERS, PARAMETER_OF, put_on
from llamem.llama.checked_inputs import check_ids, check_of_sequences
from llamem.llama.config import LlamaConfig
from llamem.llama.model import Llama
from llamem.quantized.quantized_model import is_quantized

TARGET_MODULES = (*IN_LAYERS, "head")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which adapters there are: one rank and one alpha for each, and what all of them adapt.

    An adapter's scale is `alpha / rank`; without alphas every scale is 1. `target_modules`: any of
    `llamem.adapters.TARGET_MODULES`: the seven projections of a layer, and "head".

    Raises ValueError, when it is made, for a rank that is no whole number of at least 1, for an alpha that is not above
    0, for another number of alphas than of ranks, and for targets that are unknown, twice there, or none.
    """

    ranks: tuple[int, ...]
    alphas: tuple[float, ...] | None = None
    target_modules: tuple[str, ...] = IN_LAYERS

    def __post_init__(self):
        ranks, targets = _tuple("ranks", self.ranks), _tuple("target_modules", self.target_modules)
        alphas = ranks if self.alphas is None else _tuple("alphas", self.alphas)
        if len(alphas) != len(ranks):
            raise ValueError(
                f"LoraConfig(ranks={ranks}, alphas={alphas}): expected one alpha for each of {len(ranks)} adapters."
            )
        if len(set(targets)) != len(targets):
            raise ValueError(f"LoraConfig(target_modules={targets}): expected each target once.")
        for rank, alpha in zip(ranks, alphas, strict=True):
            check_whole("rank", rank)
            check_number("alpha", alpha, above=0)
        for target in targets:
            check_one_of("target module", target, TARGET_MODULES)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "alphas", alphas)
        object.__setattr__(self, "target_modules", targets)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapters:
    """A adapters, stacked: arrays by target, so that one program serves any number, and other ones later.

    `a` `[L, A, r, in]` and `b` `[L, A, r, out]`, f32, are trained; `scale` `[L, A]`, f32, and `rank` `[L, A]`, int32,
    are not. The "head" (in: D, out: V) is outside the layers, and without the axis L.
    Heads and their channels are one axis. r is the largest rank: beyond its own an adapter is zero, and its gradients
    there are zero as well, so padding stays what it is. Rank 0: this target is not adapted in this layer.
    """

    a: dict[str, Any]
    b: dict[str, Any]
    scale: dict[str, Any]
    rank: dict[str, Any]

    @classmethod
    def create(cls, config: LlamaConfig, lora: LoraConfig, *, rngs: nnx.Rngs) -> "Adapters":
        """Make new adapters for models of this shape, which change nothing yet: `A` is random, `B` zero.

        Under `jax.eval_shape` shapes only.
        """
        assert lora.alphas is not None  # filled in when it was made
        rank_A = np.asarray(lora.ranks, np.int32)
        scale_A = np.asarray(lora.alphas, np.float32) / rank_A
        mine_Ar1 = (np.arange(rank_A.max()) < rank_A[:, None])[..., None]
        A, r = mine_Ar1.shape[:2]
        a, b, scale, rank = {}, {}, {}, {}
        for target in lora.target_modules:
            layers, n_in, n_out = shape_of(config, target)
            a_shape, b_shape = ((*layers, A, r, size) for size in (n_in, n_out))
            bound = n_in**-0.5
            a[target] = mine_Ar1 * jax.random.uniform(rngs.params(), a_shape, minval=-bound, maxval=bound)
            b[target] = jnp.zeros(b_shape)
            scale[target] = jnp.broadcast_to(scale_A, (*layers, len(scale_A)))
            rank[target] = jnp.broadcast_to(rank_A, (*layers, len(rank_A)))
        return cls(a, b, scale, rank)

    def on(self, model: Llama, adapter_B: Any = None) -> Llama:
        """Return the model with these adapters: one that computes, generates and is differentiated like any.

        `adapter_B` `[B]` says which of them each sequence uses; it may be left out where there is one, and then the
        model takes any number of sequences. The model itself stays as it is. Raises ValueError for adapters of another
        model, and for ids that are none where they are known: in a program that is traced such a sequence gets NaN.
        """
        adapter_B = check_adapters(self, adapter_B, model.config)
        return put_on(nnx.merge(*nnx.split(model)), self, adapter_B)

    @property
    def count(self) -> int:
        """How many adapters there are."""
        target = next(iter(self.scale))
        return self.scale[target].shape[-1]

    @property
    def weights(self) -> dict[str, dict[str, Any]]:
        """What is trained: `{"a": ..., "b": ...}`."""
        return {"a": self.a, "b": self.b}

    def with_weights(self, weights: dict[str, dict[str, Any]]) -> "Adapters":
        """Return these adapters with other numbers, in the structure of `weights`."""
        return dataclasses.replace(self, a=weights["a"], b=weights["b"])

    def select(self, indices: Sequence[int]) -> "Adapters":
        """Return some of them, in this order, padded no further than they need: all but one is that one unloaded.

        Raises ValueError for no index, and for one that is not there.
        """
        indices = list(indices)
        if not indices or not all(isinstance(i, (int, np.integer)) and 0 <= i < self.count for i in indices):
            raise ValueError(f"select({indices}): expected indices of adapters, 0 to {self.count - 1}, at least one.")

        picked = np.asarray(indices)

        def pick(target: str, array: Any) -> Any:
            return array[:, picked] if target in IN_LAYERS else array[picked]

        parts = {name: {t: pick(t, x) for t, x in part.items()} for name, part in vars(self).items()}
        width = {target: max(1, int(np.max(rank, initial=0))) for target, rank in parts["rank"].items()}
        for name in ("a", "b"):
            parts[name] = {target: array[..., : width[target], :] for target, array in parts[name].items()}
        return Adapters(**parts)

    @classmethod
    def join(cls, parts: "Sequence[Adapters]") -> "Adapters":
        """Join the adapters of several, of one model, as one, in order. Where one lacks a target it has rank 0."""
        if not parts:
            raise ValueError("Adapters.join: expected at least one llamem.Adapters, and there is none.")
        joined = cls({}, {}, {}, {})
        for target in [t for t in TARGET_MODULES if any(t in part.a for part in parts)]:
            axis = 1 if target in IN_LAYERS else 0
            example = next(part for part in parts if target in part.a)
            width = max(part.a[target].shape[-2] for part in parts if target in part.a)
            for name in ("a", "b", "scale", "rank"):
                like = getattr(example, name)[target]
                arrays = [_widened(getattr(part, name).get(target), like, axis, part.count, width) for part in parts]
                getattr(joined, name)[target] = jnp.concatenate(arrays, axis)
        return joined


def shape_of(config: LlamaConfig, target: str) -> tuple[tuple[int, ...], int, int]:
    """Return what stands before the adapters' axis, `(L,)` or (), and sizes in and out."""
    c = config
    D, H, K, F = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.d_ff
    sizes = {"q": (D, H), "k": (D, K), "v": (D, K), "o": (H, D), "gate": (D, F), "up": (D, F), "down": (F, D)}
    sizes["head"] = D, c.vocab_size
    return (c.n_layers,) if target in IN_LAYERS else (), *sizes[target]


def check_adapters(adapters: "Adapters", adapter_B: Any, config: LlamaConfig) -> Any:
    """Return each sequence's adapter, an array `[B]`: 0 for all where there is one adapter, and none was named.

    Raises ValueError for adapters of another model and for ids that are none. Ids are not known while a program is
    traced.
    """
    A = adapters.count
    for target in adapters.a:
        layers, n_in, n_out = shape_of(config, target)
        shapes, r = (adapters.a[target].shape, adapters.b[target].shape), adapters.a[target].shape[-2]
        expected = ((*layers, A, r, n_in), (*layers, A, r, n_out))
        if shapes != expected:
            raise ValueError(
                f"adapters of another model: A and B of {target!r} have the shapes {shapes}, and this model needs "
                f"{expected}. Take the model that they were made for."
            )
    if adapter_B is None and A == 1:
        return jnp.zeros(1, jnp.int32)
    check_of_sequences("adapter_B", adapter_B, (np.size(adapter_B),), f"which of the {A} adapters each sequence uses")
    check_ids(adapter_B, A, "adapter_B", f"there are {A} adapters.")
    return jnp.asarray(adapter_B)


def _tuple(name: str, values: Any) -> tuple:
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ValueError(f"LoraConfig({name}={values!r}): expected a tuple with at least one entry.")
    return tuple(values)


def _widened(array: Any, like: Any, axis: int, count: int, width: int) -> Any:
    """Return one part's array of a target, ranks padded to `width`; zeros for `count` adapters where it has none."""
    if array is None:
        array = jnp.zeros((*like.shape[:axis], count, *like.shape[axis + 1 :]), like.dtype)
    if array.ndim < 3 + axis:  # scales and ranks
        return array
    return jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, width - array.shape[-2]), (0, 0)])


def merge_adapter(model: Llama, adapters: Adapters, i: int) -> Llama:
    """Return a new model with weights `W + scale A' B` of adapter `i`, rounded to the weights' type once.

    An adapted head that was tied to the embedding is untied: they are two matrices then. Raises ValueError for an
    adapter that is not there, and for adapters of another model.
    """
    if is_quantized(model):
        raise ValueError(
            "merge_adapter adds to numbers, and this model's matrices are in blocks of four or eight bits: pass "
            "llamem.quantized.dequantize(model)."
        )
    adapter = adapters.select([i])
    check_adapters(adapter, None, model.config)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params["blocks"] = dict(params["blocks"])
    for target in adapter.a:
        a, b, scale = adapter.a[target], adapter.b[target], adapter.scale[target]
        if target in IN_LAYERS:
            blocks, name = params["blocks"], PARAMETER_OF[target]
            blocks[name] = _sum_by_layer(blocks[name], a[:, 0], b[:, 0], scale[:, 0])
        else:
            params["untied_head"] = _sum(model.head, b[0], a[0], scale[0])  # stored as [out, in]
    config = model.config.replace(tied_head="untied_head" not in params)
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), plan=model.plan))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


@jax.jit
def _sum(w: Any, a_rI: Any, b_rO: Any, scale: Any) -> Any:
    product_IO = scale * jnp.einsum("rI,rO->IO", a_rI, b_rO)
    return (w.astype(jnp.promote_types(w.dtype, product_IO.dtype)) + product_IO.reshape(w.shape)).astype(w.dtype)


@jax.jit
def _sum_by_layer(*stacked: Any) -> Any:
    return jax.lax.map(lambda layer: _sum(*layer), stacked)  # one layer's product alive at a time
