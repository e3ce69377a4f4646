"""Answers that a reader may well give to the exercises of notebook 12, and that are wrong: each is rejected."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from answers import Answers, refuse

from llamem_course.exercises import larger_than_the_chip


def take(stack, i):
    return jax.tree.map(lambda a: a[i], stack)


def put(stack, one, i):
    return jax.tree.map(lambda a, b: a.at[i].set(b), stack, one)


def scanned(visit, dy_ND, state, inputs_LND, reverse=True):
    """`visit(dx, state, i, x)` of every layer, the last one first: the last dx and state."""
    at = jnp.arange(len(inputs_LND)), inputs_LND
    return jax.lax.scan(lambda carry, at: (visit(*carry, *at), None), (dy_ND, state), at, reverse=reverse)[0]


def new_weights_in_the_vjp(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, state, i, x):
        one = take(state, i)
        (grads,) = jax.vjp(lambda w: layer(w, x), one["w"])[1](dx)
        state = put(state, update(one, grads), i)
        new = take(state, i)
        (dx,) = jax.vjp(lambda x: layer(new["w"], x), x)[1](dx)
        return dx, state

    return scanned(visit, dy_ND, state, inputs_LND)


def layer_computed_twice(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, state, i, x):
        one = take(state, i)
        (grads,) = jax.vjp(lambda w: layer(w, x), one["w"])[1](dx)
        (dx,) = jax.vjp(lambda x: layer(one["w"], x), x)[1](dx)
        return dx, put(state, update(one, grads), i)

    return scanned(visit, dy_ND, state, inputs_LND)


def right(layer, update, state, inputs_LND, dy_ND, reverse=True):
    def visit(dx, state, i, x):
        one = take(state, i)
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        return dx, put(state, update(one, grads), i)

    return scanned(visit, dy_ND, state, inputs_LND, reverse)


def forwards(layer, update, state, inputs_LND, dy_ND):
    return right(layer, update, state, inputs_LND, dy_ND, reverse=False)


def gradients(layer, state, inputs_LND, dy_ND):
    def step(dx, at):
        d_w, dx = jax.vjp(layer, *at)[1](dx)
        return dx, d_w

    return jax.lax.scan(step, dy_ND, (state["w"], inputs_LND), reverse=True)


def updated_afterwards(layer, update, state, inputs_LND, dy_ND):
    dx, grads = gradients(layer, state, inputs_LND, dy_ND)
    return dx, jax.vmap(update)(state, grads)


def updated_by_a_map_afterwards(layer, update, state, inputs_LND, dy_ND):
    dx, grads = gradients(layer, state, inputs_LND, dy_ND)
    return dx, jax.lax.map(lambda both: update(*both), (state, grads))


def updated_by_a_loop_afterwards(layer, update, state, inputs_LND, dy_ND):
    dx, grads = gradients(layer, state, inputs_LND, dy_ND)
    for i in range(len(inputs_LND)):
        state = put(state, update(take(state, i), take(grads, i)), i)
    return dx, state


def own_update(layer, update, state, inputs_LND, dy_ND):
    return right(layer, larger_than_the_chip._update, state, inputs_LND, dy_ND)


def dx_not_passed_on(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, state, i, x):
        one = take(state, i)
        grads, _ = jax.vjp(layer, one["w"], x)[1](dx)
        return dx, put(state, update(one, grads), i)

    return scanned(visit, dy_ND, state, inputs_LND)


def in_a_python_loop(layer, update, state, inputs_LND, dy_ND):
    for i in reversed(range(len(inputs_LND))):
        one = take(state, i)
        grads, dy_ND = jax.vjp(layer, one["w"], inputs_LND[i])[1](dy_ND)
        state = put(state, update(one, grads), i)
    return dy_ND, state


def with_the_state_scanned(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, at):
        one, x = at
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        return dx, update(one, grads)

    return jax.lax.scan(visit, dy_ND, (state, inputs_LND), reverse=True)


def state_not_returned(layer, update, state, inputs_LND, dy_ND):
    return right(layer, update, state, inputs_LND, dy_ND)[0], state


def moments_forgotten(layer, update, state, inputs_LND, dy_ND):
    dx, new = right(layer, update, state, inputs_LND, dy_ND)
    return dx, {"w": new["w"], "m": state["m"]}


def state_alone(layer, update, state, inputs_LND, dy_ND):
    return right(layer, update, state, inputs_LND, dy_ND)[1]


def wrong_dx(layer, update, state, inputs_LND, dy_ND):
    return dy_ND, right(layer, update, state, inputs_LND, dy_ND)[1]


def norms(grads):
    return jnp.sqrt(sum(jnp.sum(g**2, axis=(-1, -2)) for g in jax.tree.leaves(grads)))


def clipped_by(factor_of):
    """An answer that keeps all gradients and multiplies them by a factor of them and the limit."""

    def answer(layer, update, state, inputs_LND, dy_ND, max_norm):
        _, grads = gradients(layer, state, inputs_LND, dy_ND)
        factor = jnp.minimum(1.0, factor_of(grads, max_norm))
        return jax.vmap(update)(state, jax.tree.map(lambda g: g * jnp.reshape(factor, (-1, 1, 1)), grads))

    return answer


def clipped_in_a_map(layer, update, state, inputs_LND, dy_ND, max_norm):
    _, grads = gradients(layer, state, inputs_LND, dy_ND)
    factor = jnp.minimum(1.0, max_norm / jnp.sqrt(jnp.sum(norms(grads) ** 2)))
    return jax.lax.map(lambda both: update(both[0], jax.tree.map(lambda g: factor * g, both[1])), (state, grads))


def norm_computed_twice(layer, update, state, inputs_LND, dy_ND, max_norm):
    def visit(dx, total, i, x):
        grads, _ = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        _, dx = jax.vjp(layer, take(state, i)["w"], 1.0 * x)[1](dx)
        return dx, total + norms(grads) ** 2

    norm = jnp.sqrt(scanned(visit, dy_ND, 0.0, inputs_LND)[1])
    return right(layer, update, state, inputs_LND, jnp.minimum(1.0, max_norm / norm) * dy_ND)[1]


def clipped_by_pythons_if(layer, update, state, inputs_LND, dy_ND, max_norm):
    norm = norm_in_a_carry(layer, state, inputs_LND, dy_ND)
    if norm > max_norm:
        dy_ND = max_norm / norm * dy_ND
    return right(layer, update, state, inputs_LND, dy_ND)[1]


def clipped_by_what_is_known(layer, update, state, inputs_LND, dy_ND, max_norm):
    def visit(dx, carry, i, x):
        state, total = carry
        one = take(state, i)
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        total += norms(grads) ** 2
        factor = jnp.minimum(1.0, max_norm / jnp.sqrt(total))
        return dx, (put(state, update(one, jax.tree.map(lambda g: factor * g, grads)), i), total)

    return scanned(visit, dy_ND, (state, 0.0), inputs_LND)[1][0]


def two_passes(norm_of):
    """An answer that goes back once more, with the factor that the norm gives."""

    def answer(layer, update, state, inputs_LND, dy_ND, max_norm):
        norm = norm_of(layer, state, inputs_LND, dy_ND)
        return right(layer, update, state, inputs_LND, jnp.minimum(1.0, max_norm / norm) * dy_ND)[1]

    return answer


def norm_of_all(grads):
    return jnp.sqrt(jnp.sum(norms(grads) ** 2))


def put_into_one_stack(layer, state, inputs_LND, dy_ND):
    def visit(dx, all_grads, i, x):
        grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        return dx, put(all_grads, grads, i)

    return norm_of_all(scanned(visit, dy_ND, jax.tree.map(jnp.zeros_like, state["w"]), inputs_LND)[1])


def differentiated_whole(layer, state, inputs_LND, dy_ND):
    def whole(w):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), inputs_LND[0], w)[0]

    return norm_of_all(jax.vjp(whole, state["w"])[1](dy_ND)[0])


def largest_layer(layer, state, inputs_LND, dy_ND):
    def visit(dx, largest, i, x):
        grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        return dx, jnp.maximum(largest, norms(grads))

    return scanned(visit, dy_ND, 0.0, inputs_LND)[1]


def half_of_the_weights(layer, state, inputs_LND, dy_ND):
    return jnp.linalg.norm(gradients(layer, state, inputs_LND, dy_ND)[1]["up"])


def each_number_clipped(layer, update, state, inputs_LND, dy_ND, max_norm):
    def clipped(one, grads):
        return update(one, jax.tree.map(lambda g: jnp.clip(g, -max_norm, max_norm), grads))

    return right(layer, clipped, state, inputs_LND, dy_ND)[1]


def updated_by_pairs(layer, update, state, inputs_LND, dy_ND):
    for last in range(len(inputs_LND) - 1, -1, -2):
        pair, found = [i for i in (last, last - 1) if i >= 0], []
        for i in pair:
            grads, dy_ND = jax.vjp(layer, take(state, i)["w"], inputs_LND[i])[1](dy_ND)
            found.append(grads)
        grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        state = put(state, jax.vmap(update)(take(state, jnp.array(pair)), grads), jnp.array(pair))
    return dy_ND, state


def updated_a_turn_late(layer, update, state, inputs_LND, dy_ND):
    last = len(inputs_LND) - 1
    waiting, dy_ND = jax.vjp(layer, take(state, last)["w"], inputs_LND[last])[1](dy_ND)

    def visit(dx, carry, i, x):
        state, waiting = carry
        grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        return dx, (put(state, update(take(state, i + 1), waiting), i + 1), grads)

    dx, (state, waiting) = scanned(visit, dy_ND, (state, waiting), inputs_LND[:-1])
    return dx, put(state, update(take(state, 0), waiting), 0)


def updated_a_turn_late_in_a_cond(layer, update, state, inputs_LND, dy_ND):
    last = len(inputs_LND) - 1

    def visit(dx, carry, i, x):
        state, waiting = carry
        state = jax.lax.cond(
            i < last,
            lambda state: put(state, jax.jit(update)(take(state, i + 1), waiting), i + 1),
            lambda state: state,
            state,
        )
        grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        return dx, (state, grads)

    nothing = jax.tree.map(jnp.zeros_like, take(state, 0)["w"])
    dx, (state, waiting) = scanned(visit, dy_ND, (state, nothing), inputs_LND)
    return dx, put(state, update(take(state, 0), waiting), 0)


def turned_round(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, at):
        one, x = at
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        return dx, update(one, grads)

    return jax.lax.scan(visit, dy_ND, (take(state, slice(None, None, -1)), inputs_LND[::-1]))


def turned_round_and_back(layer, update, state, inputs_LND, dy_ND):
    dx, new = turned_round(layer, update, state, inputs_LND, dy_ND)
    return dx, take(new, slice(None, None, -1))


def into_a_second_state(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, new, i, x):
        one = take(state, i)
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        return dx, put(new, update(one, grads), i)

    return scanned(visit, dy_ND, jax.tree.map(jnp.zeros_like, state), inputs_LND)


def chosen_from_two_stacks(layer, update, state, inputs_LND, dy_ND):
    def visit(dx, state, i, x):
        one = take(state, i)
        grads, dx = jax.vjp(layer, one["w"], x)[1](dx)
        here = (jnp.arange(len(inputs_LND)) == i)[:, None, None]
        return dx, jax.tree.map(lambda a, b: jnp.where(here, b, a), state, update(one, grads))

    return scanned(visit, dy_ND, state, inputs_LND)


def clipped_in_python_loops(layer, update, state, inputs_LND, dy_ND, max_norm):
    dx, total = dy_ND, 0.0
    for i in reversed(range(len(inputs_LND))):
        grads, dx = jax.vjp(layer, take(state, i)["w"], inputs_LND[i])[1](dx)
        total += norms(grads) ** 2
    smaller_ND = dy_ND * jnp.minimum(1.0, max_norm / jnp.sqrt(total))
    return in_a_python_loop(layer, update, state, inputs_LND, smaller_ND)[1]


def uphill(layer, update, state, inputs_LND, dy_ND):
    return right(layer, lambda one, g: update(one, jax.tree.map(jnp.negative, g)), state, inputs_LND, dy_ND)


def inputs_of_the_next(layer, update, state, inputs_LND, dy_ND):
    return right(layer, update, state, jnp.roll(inputs_LND, -1, axis=0), dy_ND)


def inputs_computed_again(layer, update, state, inputs_LND, dy_ND):
    _, again = jax.lax.scan(lambda x, w: (layer(w, x), x), inputs_LND[0], state["w"])
    return right(layer, update, state, again, dy_ND)


def updated_in_both_passes(layer, update, state, inputs_LND, dy_ND, max_norm):
    state = right(layer, update, state, inputs_LND, dy_ND)[1]
    return right(layer, update, state, inputs_LND, dy_ND)[1]


def not_clipped(layer, update, state, inputs_LND, dy_ND, max_norm):
    return right(layer, update, state, inputs_LND, dy_ND)[1]


HIDDEN, BACKWARD, CLIPPED = (
    larger_than_the_chip.check_hidden_from,
    larger_than_the_chip.check_backward_scan,
    larger_than_the_chip.check_clipped_scan,
)


def hidden(trained: tuple[int, int], frozen: tuple[int, int]) -> Callable[..., float]:
    """An answer that moves so many numbers of a weight, and computes so many FLOPs with it."""

    def answer(flops, link, weight_bytes, is_trained):
        moved, work = trained if is_trained else frozen
        return weight_bytes * moved * flops / (link * work)

    return answer


def clipped_before(backward):
    """What arrives is made smaller, and then `backward` runs: gradients are linear in it, so all are clipped."""

    def clipped(layer, update, state, inputs_LND, dy_ND, max_norm):
        norm = norm_in_a_carry(layer, state, inputs_LND, dy_ND)
        return backward(layer, update, state, inputs_LND, jnp.minimum(1.0, max_norm / norm) * dy_ND)[1]

    return clipped


WRONG: Answers = {
    "nothing recomputed": (HIDDEN, hidden((7, 6), (2, 4)), "What runs once more"),
    "the forward pass alone": (HIDDEN, hidden((7, 2), (2, 2)), "forward pass alone"),
    "nothing goes back": (HIDDEN, hidden((5, 8), (2, 6)), "what goes back"),
    "weights fetched once": (HIDDEN, hidden((6, 8), (1, 6)), "In which passes"),
    "weights and moments once": (HIDDEN, hidden((3, 8), (2, 6)), "in one direction"),
    "frozen, and yet a gradient": (HIDDEN, hidden((7, 8), (2, 8)), "nobody asked for"),
    "frozen, and yet moved": (HIDDEN, hidden((7, 8), (7, 6)), "has to cross the link"),
    "frozen, as if trained": (HIDDEN, hidden((7, 8), (7, 8)), "has to cross the link"),
    "frozen, fetched once": (HIDDEN, hidden((7, 8), (1, 6)), "In which passes"),
    "frozen, nothing recomputed": (HIDDEN, hidden((7, 8), (2, 4)), "what runs once more"),
    "frozen, and goes home": (HIDDEN, hidden((7, 8), (3, 6)), "Does a frozen weight go home"),
    "gradients go home too": (HIDDEN, hidden((8, 8), (2, 6)), "Do you send gradients"),
    "the backward pass alone": (HIDDEN, hidden((6, 6), (1, 4)), "leave the forward pass out"),
    "a whole matrix against one weight": (
        HIDDEN,
        lambda flops, link, size, _: 4096**2 * size * flops / link,
        "cancels",
    ),
    "four bytes, always": (
        HIDDEN,
        lambda flops, link, size, trained: hidden((7, 8), (2, 6))(flops, link, 4, trained),
        "four",
    ),
    "one direction of the cable": (HIDDEN, hidden((4, 8), (2, 6)), "one direction of the cable"),
    "frozen, the forward pass alone": (HIDDEN, hidden((7, 8), (2, 2)), "forward pass alone"),
    "thousands of tokens": (
        HIDDEN,
        lambda *given: hidden((7, 8), (2, 6))(*given) / 1000,
        "Set them equal",
    ),
    "the speeds swapped": (HIDDEN, lambda flops, link, size, _: size * link / flops, "Set them equal"),
    "bits": (HIDDEN, lambda flops, link, size, trained: 8 * size * flops / link, "are not it"),
    "an addition costs nothing": (HIDDEN, hidden((7, 4), (2, 3)), "and an addition"),
    "a list": (HIDDEN, lambda flops, link, size, trained: [1.0, 2.0], "one number"),
    "as it was given": (BACKWARD, new_weights_in_the_vjp, "whose weights"),
    "the layer computed twice": (BACKWARD, layer_computed_twice, "from one forward pass"),
    "forwards": (BACKWARD, forwards, "known first"),
    "updated after the scan": (BACKWARD, updated_afterwards, "Where must the update stand"),
    "updated by a map after the scan": (BACKWARD, updated_by_a_map_afterwards, "Where must the update stand"),
    "updated by a loop after the scan": (BACKWARD, updated_by_a_loop_afterwards, "Where must the update stand"),
    "an update of one's own": (BACKWARD, own_update, "is it `update` that you call"),
    "dx not passed on": (BACKWARD, dx_not_passed_on, "carried on"),
    "the old state": (BACKWARD, state_not_returned, "came back as it was"),
    "the moments forgotten": (BACKWARD, moments_forgotten, "moments came back"),
    "the state alone": (BACKWARD, state_alone, "return two things"),
    "not the input's gradient": (BACKWARD, wrong_dx, "first layer's input is not"),
    "updated by pairs": (BACKWARD, updated_by_pairs, "Where must the update stand"),
    "updated a turn late": (BACKWARD, updated_a_turn_late, "Where must the update stand"),
    "updated a turn late, in a cond": (BACKWARD, updated_a_turn_late_in_a_cond, "Where must the update stand"),
    "clipped and updated a turn late": (
        CLIPPED,
        clipped_before(updated_a_turn_late),
        "Where must the update stand",
    ),
    "a loop of Python's": (BACKWARD, in_a_python_loop, "writes each layer into it"),
    "a loop of Python's, clipped": (CLIPPED, clipped_in_python_loops, "writes each layer into it"),
    "the stack turned round and back": (BACKWARD, turned_round_and_back, "`rev` makes an array"),
    "a second state": (BACKWARD, into_a_second_state, "no room for two"),
    "a turn writes the whole stack": (BACKWARD, chosen_from_two_stacks, "may a turn write"),
    "new layers stacked up by the scan": (BACKWARD, with_the_state_scanned, "outputs are a second stack"),
    "new layers stacked up by the scan, clipped": (
        CLIPPED,
        clipped_before(with_the_state_scanned),
        "outputs are a second stack",
    ),
    "the stack turned round": (BACKWARD, turned_round, "in reverse order"),
    "uphill": (BACKWARD, uphill, "not those of autodiff"),
    "the next layer's input": (BACKWARD, inputs_of_the_next, "not those of autodiff"),
    "inputs computed again": (BACKWARD, inputs_computed_again, "are enough"),
    "the two swapped": (BACKWARD, lambda *args: right(*args)[::-1], "other names"),
    "gradients kept": (CLIPPED, clipped_by(lambda g, most: most / jnp.sqrt(jnp.sum(norms(g) ** 2))), "stand"),
    "gradients kept, updated by a map": (CLIPPED, clipped_in_a_map, "Where must the update stand"),
    "gradients kept for the norm": (
        CLIPPED,
        two_passes(lambda *given: norm_of_all(gradients(*given)[1])),
        "gradients of several layers",
    ),
    "gradients put into one stack for the norm": (
        CLIPPED,
        two_passes(put_into_one_stack),
        "gradients of several layers",
    ),
    "all differentiated at once for the norm": (
        CLIPPED,
        two_passes(differentiated_whole),
        "gradients of several layers",
    ),
    "the norm of the largest layer": (CLIPPED, two_passes(largest_layer), "by one factor"),
    "the norm of half of the weights": (CLIPPED, two_passes(half_of_the_weights), "by one factor"),
    "each number clipped": (CLIPPED, each_number_clipped, "not clipped"),
    "three ways back": (CLIPPED, norm_computed_twice, "two ways back"),
    "the norm of dy": (
        CLIPPED,
        lambda layer, update, state, inputs, dy, most: right(
            layer, update, state, inputs, dy * jnp.minimum(1.0, most / jnp.linalg.norm(dy))
        )[1],
        "norm of dy_ND|by another norm|differ from",
    ),
    "each layer's own norm": (CLIPPED, clipped_by(lambda g, most: most / norms(g)), "norm of all of them"),
    "norms added up": (CLIPPED, clipped_by(lambda g, most: most / jnp.sum(norms(g))), "Of which numbers|differ from"),
    "no root": (CLIPPED, clipped_by(lambda g, most: most / jnp.sum(norms(g) ** 2)), "a root|differ from"),
    "by Python's if": (CLIPPED, clipped_by_pythons_if, "Which function of jnp"),
    "by what is known": (CLIPPED, clipped_by_what_is_known, "When is the norm"),
    "updated twice": (CLIPPED, updated_in_both_passes, "updated once"),
    "not clipped": (CLIPPED, not_clipped, "nothing changed"),
    "also when it is small": (
        CLIPPED,
        clipped_by(lambda g, most: 0.5 * most / jnp.sqrt(jnp.sum(norms(g) ** 2))),
        "by one factor|differ from",
    ),
    "the old state, clipped": (CLIPPED, lambda layer, update, state, *rest: state, "came back as it was"),
}


@pytest.mark.parametrize("answer", WRONG)
def test_a_wrong_answer_gets_the_hint_that_fits(answer):
    refuse(WRONG[answer])


def test_the_loss_falls_in_spite_of_the_mistake():
    """As exercise 2 says of what is to be repaired."""
    layer, (state, inputs_LND, target_ND) = larger_than_the_chip._layer, larger_than_the_chip._given()

    def update(state, grads):
        return {"w": jax.tree.map(lambda w, g: w - 0.003 * g, state["w"], grads), "m": state["m"]}

    def step(state, _):
        y_ND, entered_LND = jax.lax.scan(lambda x, w: (layer(w, x), x), inputs_LND[0], state["w"])
        loss, dy_ND = jax.value_and_grad(lambda y: jnp.mean((y - target_ND) ** 2))(y_ND)
        return new_weights_in_the_vjp(layer, update, state, entered_LND, dy_ND)[1], loss

    _, losses = jax.jit(lambda state: jax.lax.scan(step, state, length=100))(state)
    assert losses[-1] < 0.7 * losses[0], losses


def norm_in_a_carry(layer, state, inputs_LND, dy_ND):
    def visit(dx, total, i, x):
        grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
        return dx, total + norms(grads) ** 2

    return jnp.sqrt(scanned(visit, dy_ND, 0.0, inputs_LND)[1])


def test_other_right_answers_are_accepted(capsys):
    """Gradients are linear in what arrives: whoever makes that smaller has clipped them all."""

    def weights_fetched_a_turn_early(layer, update, state, inputs_LND, dy_ND):
        def visit(dx, carry, i, x):
            state, fetched = carry
            grads, dx = jax.vjp(layer, fetched["w"], x)[1](dx)
            early = take(state, jnp.maximum(i - 1, 0))
            return dx, (put(state, jax.jit(update)(fetched, grads), i), early)

        dx, (state, _) = scanned(visit, dy_ND, (state, take(state, -1)), inputs_LND)
        return dx, state

    def in_a_fori_loop(layer, update, state, inputs_LND, dy_ND):
        def visit(turn, carry):
            dx, state = carry
            i = len(inputs_LND) - 1 - turn
            one = take(state, i)
            grads, dx = jax.jit(lambda w, x, dx: jax.vjp(layer, w, x)[1](dx))(one["w"], inputs_LND[i], dx)
            return dx, put(state, jax.lax.cond(i >= 0, update, lambda one, _: one, one, grads), i)

        return jax.lax.fori_loop(0, len(inputs_LND), visit, (dy_ND, state))

    def state_carried_along(layer, state, inputs_LND, dy_ND):
        def visit(dx, carry, i, x):
            state, total = carry
            grads, dx = jax.vjp(layer, take(state, i)["w"], x)[1](dx)
            return dx, (state, total + norms(grads) ** 2)

        return jnp.sqrt(scanned(visit, dy_ND, (state, 0.0), inputs_LND)[1][1])

    for answer in (right, weights_fetched_a_turn_early, in_a_fori_loop):
        BACKWARD(answer)
    CLIPPED(two_passes(state_carried_along))
    CLIPPED(clipped_before(right))
    HIDDEN(hidden((7, 8), (2, 6)))
    assert capsys.readouterr().out.count("correct") == 6
