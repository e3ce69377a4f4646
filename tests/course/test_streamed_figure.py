"""The figures of notebook 12: what lies on the chip is told by shapes, a link is hidden where both sides are equal."""

import dataclasses

import matplotlib.pyplot as plt
import pytest

from jaxmem.reading.timeline import Loop, Span, Timeline
from llamem.llama.config import LlamaConfig
from llamem.planner.roofline import Seconds
from llamem_course import streamed_figure

MIB = 2**20


def span(name, shape, first, last, number):
    return Span(name, MIB, first, last, "device", number, 0, shape, "residuals", "", "", "")


def test_a_buffer_is_what_its_shape_says():
    config = LlamaConfig.from_name("tiny")
    shapes = {
        f"f32[{config.vocab_size},{config.d_model}]": "weights",
        f"f32[1,{config.d_model},{config.d_ff}]": "optimizer",
        f"bf16[{config.d_ff},{config.d_model}]": "optimizer",
        f"bf16[1,77,{config.d_model}]": "workspace",
    }
    buffers = tuple(span(f"b{i}", shape, i, 9, i) for i, shape in enumerate(shapes))
    loops = (Loop(1, 4, config.n_layers), Loop(5, 9, config.n_layers))
    one = Timeline("v5e-1", 16 * MIB, 4 * MIB, 10, buffers, loops, (), ("",) * 10)
    shown = streamed_figure.visiting(one, config)
    assert [buffer.category for buffer in shown.buffers] == list(shapes.values())
    assert shown.by_category()["optimizer"].tolist() == [0, MIB] + 8 * [2 * MIB]
    fig, alt = streamed_figure.visitors_drawn(one, config)
    words = {text.get_text() for text in fig.axes[0].texts}
    times = f"\nx {config.n_layers}"
    assert "Highest in the backward loop" in alt and {f"forward{times}", f"backward and update{times}"} <= words
    plt.close(fig)


def test_loops_of_tiles_with_as_many_turns_are_no_loops_over_layers():
    config = LlamaConfig.from_name("tiny")
    of_a_layer = span("w", f"f32[1,{config.d_model},{config.d_ff}]", 3, 6, 0)
    loops = (Loop(1, 8, config.n_layers), Loop(2, 5, config.n_layers), Loop(9, 12, config.n_layers), Loop(12, 14, 7))
    one = Timeline("v5e-1", 16 * MIB, 4 * MIB, 15, (of_a_layer,), loops, (), ("",) * 15)
    assert streamed_figure.loops_over_layers(one, config) == [loops[0]]


def test_a_copy_is_beside_a_product_that_begins_while_it_is_on_its_way():
    operations = ["dot_general" if step in (5, 8, 13) else "add" for step in range(15)]
    fetched, given_back = "while/body/jit(dynamic_index_in_dim)/dynamic_slice", "while/body/dynamic_update_slice"
    made = [
        ("(bf16[4,2,3], bf16[1,2,3])", 6, 9, fetched),  # the product at 8
        ("(f32[4,2,3], f32[1,2,3])", 5, 8, fetched),  # from the one to the other: none
        ("f32[1,2,3]", 2, 9, fetched),  # no copy
        ("(f32[4,2,3], f32[1,2,3])", 4, 9, given_back),  # home
        ("(f32[4,2,3], f32[1,2,3])", 11, 14, fetched),  # after the turn
    ]
    buffers = tuple(
        dataclasses.replace(span("start", shape, first, last, i), operation=operation)
        for i, (shape, first, last, operation) in enumerate(made)
    )
    one = Timeline("v5e-1", None, MIB, 15, buffers, (Loop(1, 10, 4),), (), tuple(operations))
    turn = streamed_figure.Turn.of(one)
    assert (turn.copies, turn.products, turn.beside, turn.pairs) == (((5, 8), (6, 9)), (5, 8), 1, 4)
    both = dataclasses.replace(one, loops=(*one.loops, Loop(11, 15, 4)))
    second = streamed_figure.Turn.of(both, loop=1)
    assert (second.copies, second.products, second.beside) == (((11, 14),), (13,), 1)
    fig, alt = streamed_figure.turns_drawn({("v5e-1", "a step"): turn})
    assert "v5e-1, a step: 1 of 4" in alt
    plt.close(fig)


def test_a_link_is_hidden_where_arithmetic_takes_as_long():
    lengths = (1000, 2000, 4000, 8000)
    steps = [Seconds(products=n / 1000, attention=n / 1000, traffic=5, host_link=6, chip_link=0) for n in lengths]
    assert streamed_figure.hidden_at(lengths, steps) == pytest.approx(3000, rel=0.01)
    fig, alt = streamed_figure.crossings_drawn(lengths, {"a": steps, "b": steps})
    assert len(fig.axes) == 2 and alt.count("3 thousand") == 2
    plt.close(fig)
