"""Figures: alternative text goes with them, and they show the numbers they were given."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle

import llamem
from llamem.course import mesh_figure, plots
from llamem.course.tile_figure import TWO_CUTS_ALT, ledger_drawn, two_cuts


@pytest.fixture
def shown(monkeypatch):
    calls = []
    monkeypatch.setattr(plots, "display", lambda figure, metadata: calls.append((figure, metadata)))
    return calls


def test_show_displays_once_with_its_text_and_closes(shown):
    fig, _ = plt.subplots()
    plots.show(fig, alt="A line that rises.")
    assert shown == [(fig, {"image/png": {"alt": "A line that rises."}})]
    assert not plt.fignum_exists(fig.number)


def test_a_figure_without_words_is_refused(shown):
    fig, _ = plt.subplots()
    with pytest.raises(ValueError, match="say in a sentence"):
        plots.show(fig, alt=" ")
    assert not shown
    plt.close(fig)


def test_bars_add_up_to_the_peak():
    shape = jax.ShapeDtypeStruct((2048, 1024), "float32")
    report = llamem.compile_report(lambda a: a @ a.T, shape)
    fig = plots.report_bars({"product": report})
    width = sum(bar.get_bbox().width for bar in fig.axes[0].patches if isinstance(bar, Rectangle))
    assert width == pytest.approx(report.peak_bytes / 2**30)
    assert "GiB" in fig.axes[0].get_xlabel()
    plt.close(fig)


def test_residual_bars_name_each_array_and_its_line():
    kept = llamem.saved_residuals(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), jnp.ones((64, 32)), jnp.ones((16, 64)))
    fig = plots.residual_bars(kept, most=2)
    ax = fig.axes[0]
    widths = sorted(bar.get_bbox().width for bar in ax.patches if isinstance(bar, Rectangle))
    assert widths == pytest.approx(sorted(row.bytes / 2**20 for row in kept.rows[:2]))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "float32[64,32]  [0]" and "smaller ones hold" in ax.get_xlabel()
    plt.close(fig)


def test_loss_curves_show_each_step_and_name_their_bars():
    metrics = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "val_loss": 2.5}]
    fig = plots.loss_curves(metrics, "held-out text", {"only counts": 2.2})
    ax = fig.axes[0]
    assert [np.asarray(line.get_ydata()).tolist() for line in ax.lines] == [[3.0, 2.0], [2.5], [2.2, 2.2]]
    assert [text.get_text() for text in ax.texts] == ["only counts"]
    plt.close(fig)


def test_a_ledger_stacks_its_parts_on_the_floor():
    fig = ledger_drawn(2.0, {"all": {"logits": 4.0}, "tiles": {"logits": 0.5, "sum": 1.0}}, {"tiles": 3.6})
    ax = fig.axes[0]
    assert [text.get_text() for text in ax.texts] == ["6.000", "3.500; compiled 3.600"]
    ends = [bar.get_bbox().x1 for bar in ax.patches if isinstance(bar, Rectangle)]
    assert ends == [2.0, 2.0, 6.0, 2.5, 6.0, 3.5]
    plt.close(fig)


def test_lines_of_a_program_are_its_collectives_and_loops_with_their_trips():
    program = """
  %sum.1 = f32[8]{0} all-reduce-start(%a), channel_id=1, metadata={op_name="psum"}
  %add = f32[8]{0} add(%a, %all-reduce.2)
  %while.3 = (s32[], f32[8]{0}) while(%t), body=%b, backend_config={"known_trip_count":{"n":"12"}}"""
    assert list(mesh_figure.lines_of(program)) == ["%sum.1 = f32[8]{0} all-reduce-start(%a), channel_id=1"]
    assert list(mesh_figure.lines_of(program, ("while",))) == ["%while.3 = (...) while(%t), body=%b ... runs 12 times"]


def test_a_reduce_scatter_leaves_each_device_one_part_of_the_sum():
    fig = mesh_figure.collectives_drawn()
    sums = {ax.get_title(): [text.get_text() for text in ax.texts].count("Σ") for ax in fig.axes}
    assert sums == {"all-gather": 0, "reduce-scatter": 4, "all-reduce": 16}
    plt.close(fig)


def test_the_two_cuts_finish_one_gradient_each_and_add_to_the_other():
    fig = two_cuts()
    for ax, finished, whole in zip(fig.axes, ((1, 1), (1.5, 1)), ((6, 1), (1, 4)), strict=True):
        sizes = {
            patch.get_hatch(): (patch.get_width(), patch.get_height())
            for patch in ax.patches
            if isinstance(patch, Rectangle)
        }
        assert sizes["//"] == finished and sizes["xx"] == whole
        assert "a tile" in [text.get_text() for text in ax.texts]
    assert {text.get_text() for legend in fig.legends for text in legend.get_texts()} >= {"reads", "finishes"}
    assert "adds to all of dW" in TWO_CUTS_ALT
    plt.close(fig)
