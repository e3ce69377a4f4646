"""Sliders under a picture. The picture itself is drawn by a plain function, and stands in the notebook without them."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets
import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def explore(draw: Callable[..., Figure], /, **choices: Sequence[Any]) -> Any:
    """Return a slider for each argument of `draw` in `choices`, and its figure; as a cell's last line they are shown.

    The first of an argument's choices is where its slider begins. Draw the figure once by itself before, since GitHub
    shows no sliders. Raises ValueError where there is nothing to choose.
    """
    if not choices or not all(len(values) for values in choices.values()):
        raise ValueError("explore(draw, ...): name the arguments of draw and what each may be, such as depth=(8, 16).")
    sliders = {
        name: ipywidgets.SelectionSlider(options=list(values), value=values[0], description=name.replace("_", " "))
        for name, values in choices.items()
    }
    picture = ipywidgets.Image(format="png")  # no Output widget: those stop what runs notebooks without a browser

    def update(*_: Any) -> None:
        fig, png = draw(**{name: slider.value for name, slider in sliders.items()}), io.BytesIO()
        fig.savefig(png, bbox_inches="tight")
        plt.close(fig)
        picture.value = png.getvalue()

    for slider in sliders.values():
        slider.observe(update, names="value")
    update()
    return ipywidgets.VBox([*sliders.values(), picture])
