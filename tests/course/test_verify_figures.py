"""The figures of notebook 10: memory of several programs on one axis, and a word where a proof does not hold."""

import matplotlib.pyplot as plt
from timelines import handmade

from llamem_course.verify_figures import plateaus, proof_grid


def test_each_program_has_its_peak_and_its_sentence():
    programs = {"off": handmade(residuals=6), "on": handmade(residuals=1)}
    fig, alt = plateaus(programs, {"off": "kept", "on": "computed again"})
    assert len(fig.axes) == 2 and fig.axes[0].get_ylim() == fig.axes[1].get_ylim()
    assert "kept" in {text.get_text() for text in fig.axes[0].texts}
    assert "off: peak" in alt and "computed again" in alt
    plt.close(fig)


def test_a_word_stands_where_a_proof_does_not_hold():
    marks = {
        "sound": {"same loss": "ok", "memory falls": "ok"},
        "broken": {"same loss": "ok", "memory falls": "FAILED"},
    }
    fig, alt = proof_grid(marks)
    (word,) = fig.axes[0].texts
    assert word.get_position() == (1, 1) and word.get_text() == "fails"
    assert "sound: all ok; broken: memory falls FAILED" in alt
    plt.close(fig)
