"""A mixture of experts in place of a feed-forward: every token goes to the k experts that its router prefers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from llamem.layers.trees import with_zeros

MAX_GROUP = 512  # rows of one expert that are multiplied at once


def route(logits_NE: Float[Array, "N E"], experts_per_token: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """Return each token's k likeliest experts and their shares, f32, which sum to 1: softmax, top-k, renormalised.

    Source: Qwen3-MoE (arXiv 2505.09388), with `norm_topk_prob`; Shazeer et al. 2017.
    """
    shares_Nk, experts_Nk = jax.lax.top_k(jax.nn.softmax(logits_NE.astype(jnp.float32), axis=-1), experts_per_token)
    return shares_Nk / jnp.sum(shares_Nk, axis=-1, keepdims=True), experts_Nk


def mixture(
    x_BTD: Float[Array, "B T D"],
    w_router_DE: Float[Array, "D E"],
    w_gate_EDF: Float[Array, "E D F"],
    w_up_EDF: Float[Array, "E D F"],
    w_down_EFD: Float[Array, "E F D"],
    experts_per_token: int,
) -> Float[Array, "B T D"]:
    """Mix k SwiGLU experts per token by their shares. No token is dropped, and only chosen experts are computed.

    Tokens are sorted by expert and padded to groups of equal size, one expert each; a loop multiplies group by group.
    So the work is that of k experts per token plus at most one group per expert, on every kind of chip. Named for
    `llamem.Policy`: "router" (the router's logits: saved, rematerialisation cannot route differently), "gate", "up".
    Weights that are not differentiated cost no gradient work. Raises ValueError where there is no token.
    """
    B, T, D = x_BTD.shape
    if B * T == 0:
        raise ValueError(f"a mixture of experts of x_BTD {x_BTD.shape}: expected at least one token to route.")
    E, k = w_router_DE.shape[1], experts_per_token
    x_ND = x_BTD.reshape(-1, D)
    logits_NE = jnp.einsum("ND,DE->NE", x_ND, w_router_DE, preferred_element_type=jnp.float32)
    shares_Nk, experts_Nk = route(checkpoint_name(logits_NE, "router"), k)
    place_Nk, expert_G, group = _places(experts_Nk, E)
    # Every place reads one token; those that pad a group read past the end, which gives zeros.
    token_P = jnp.full(expert_G.size * group, B * T).at[place_Nk].set(jnp.arange(B * T)[:, None])
    x_GgD = x_ND.at[token_P].get(mode="fill", fill_value=0).reshape(-1, group, D)
    gate_GgF = checkpoint_name(grouped_matmul(x_GgD, w_gate_EDF, expert_G), "gate")
    up_GgF = checkpoint_name(grouped_matmul(x_GgD, w_up_EDF, expert_G), "up")
    out_GgD = grouped_matmul(jax.nn.silu(gate_GgF) * up_GgF, w_down_EFD, expert_G)
    out_NkD = out_GgD.reshape(-1, D)[place_Nk]
    mixed_ND = jnp.einsum("NkD,Nk->ND", out_NkD, shares_Nk.astype(x_BTD.dtype), preferred_element_type=jnp.float32)
    return mixed_ND.astype(x_BTD.dtype).reshape(B, T, D)


def _places(experts_Nk: Array, E: int) -> tuple[Array, Array, int]:
    """Return each choice's place among the sorted and padded rows, each group's expert, and the rows of a group."""
    choices_A = experts_Nk.reshape(-1)
    A = choices_A.size
    group = min(MAX_GROUP, 8 * -(-A // (8 * E)))
    n_groups = A // group + min(E, A)  # the most that any routing needs
    counts_E = jnp.bincount(choices_A, length=E)
    last_group_E = jnp.cumsum(-(-counts_E // group))
    first_place_E = (last_group_E - -(-counts_E // group)) * group
    order_A = jnp.argsort(choices_A)
    sorted_A = choices_A[order_A]
    rank_A = jnp.arange(A) - (jnp.cumsum(counts_E) - counts_E)[sorted_A]
    place_A = jnp.zeros(A, jnp.int32).at[order_A].set((first_place_E[sorted_A] + rank_A).astype(jnp.int32))
    expert_G = jnp.minimum(jnp.searchsorted(last_group_E, jnp.arange(n_groups), side="right"), E - 1)
    return place_A.reshape(experts_Nk.shape), expert_G, group


@jax.custom_vjp
def grouped_matmul(
    x_GgD: Float[Array, "G g D"], w_EDF: Float[Array, "E D F"], expert_G: Int[Array, " G"]
) -> Float[Array, "G g F"]:
    """Compute `x_GgD[i] @ w_EDF[expert_G[i]]` for every group i, in a loop that copies no weights.

    `jax.lax.ragged_dot` is this product too, but off TPUs it multiplies every row with every expert.
    """
    return jax.lax.map(lambda group: group[0] @ w_EDF[group[1]], (x_GgD, expert_G))


def _grouped_fwd(x_GgD: Any, w_EDF: Any, expert_G: Any) -> tuple[Array, Any]:
    # Frozen weights need no rows: none are kept, and that says so.
    rows_GgD = x_GgD.value if w_EDF.perturbed else x_GgD.value[:0]
    return grouped_matmul(x_GgD.value, w_EDF.value, expert_G.value), (rows_GgD, w_EDF.value, expert_G.value)


def _grouped_bwd(residuals: Any, d_GgF: Array) -> tuple[Array, Any, None]:
    x_GgD, w_EDF, expert_G = residuals
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def back(d_gF: Array, expert: Array) -> Array:
        return product("gF,DF->gD", d_gF, w_EDF[expert]).astype(x_GgD.dtype)

    if not x_GgD.size:
        dx_GgD = jax.lax.map(lambda group: back(*group), (d_GgF, expert_G))
        return with_zeros((dx_GgD, None, None), residuals)

    # Left to itself, autodiff would add a gradient of all experts, mostly zeros, for every group.
    def step(dw_EDF: Array, group: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        x_gD, d_gF, expert = group
        return dw_EDF.at[expert].add(product("gD,gF->DF", x_gD, d_gF)), back(d_gF, expert)

    dw_EDF, dx_GgD = jax.lax.scan(step, jnp.zeros(w_EDF.shape, jnp.float32), (x_GgD, d_GgF, expert_G))
    return dx_GgD, dw_EDF.astype(w_EDF.dtype), None


grouped_matmul.defvjp(_grouped_fwd, _grouped_bwd, symbolic_zeros=True)
