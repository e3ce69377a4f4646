"""The figures of notebook 12: what lies on the chip is told by shapes, and a copy hides beside a matmul it meets."""

import dataclasses

import matplotlib.pyplot as plt

from jaxmem.reading.timeline import Loop, Span, Timeline
from llamem.llama.config import LlamaConfig
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


def test_a_copy_is_beside_a_matmul_that_begins_while_it_is_on_its_way():
    operations = ["dot_general" if step in (5, 8, 13) else "add" for step in range(15)]
    fetched, given_back = "while/body/jit(dynamic_index_in_dim)/dynamic_slice", "while/body/dynamic_update_slice"
    made = [
        ("(bf16[4,2,3], bf16[1,2,3])", 6, 9, fetched),  # the matmul at 8
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
    assert (turn.copies, turn.matmuls, turn.beside, turn.pairs) == (((5, 8), (6, 9)), (5, 8), 1, 4)
    both = dataclasses.replace(one, loops=(*one.loops, Loop(11, 15, 4)))
    second = streamed_figure.Turn.of(both, loop=1)
    assert (second.copies, second.matmuls, second.beside) == (((11, 14),), (13,), 1)
    fig, alt = streamed_figure.turns_drawn({"v5e-1": turn})
    assert "v5e-1: 1 of 4" in alt
    plt.close(fig)
