"""The figure of notebook 12: what lies on the chip is told by shapes."""

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
