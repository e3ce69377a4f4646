"""What a notebook does with its parameters first: names of chips are checked, sizes chosen."""

from collections.abc import Mapping
from typing import Any

from jaxmem.chips.chip import Chip
from jaxmem.chips.names import chip_called


def check_parameters(*rules: tuple[bool, str], **chips: Any) -> None:
    """Raise ValueError for a rule that is broken, with its sentence, and for a chip that nobody knows.

    A rule is whether it holds, and what to do where it does not: `(depth % 4 == 0, "depth: take 4, 8, 12 ...")`. Each
    keyword is a parameter that names one chip or a list of them. Whether a compiler for the chip is installed does not
    matter here.
    """
    for holds, sentence in rules:
        if not holds:
            raise ValueError(sentence)
    for parameter, value in chips.items():
        for name in value if isinstance(value, list) else [value]:
            try:
                chip_called(name)
            except ValueError as unknown:
                raise ValueError(f"{parameter}: {unknown}") from None


def sizes_for(chip: Chip, wished: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a preset and the sizes of a run that are worth a device; a size that is wished, and not None, comes first.

    A CPU's run takes a minute or two. The larger ones were chosen from compilers' reports, and have not been run.
    """
    if chip.platform == "cpu":
        preset, sizes = "tiny", dict(steps=120, batch_size=1, seq_len=128, learning_rate=6e-3)
    elif (chip.capacity_bytes or 0) < 60 * 2**30:
        preset, sizes = "small", dict(steps=1000, batch_size=16, seq_len=1024, learning_rate=1e-3)
    else:
        preset, sizes = "llama3.2-1b", dict(steps=1000, batch_size=16, seq_len=2048, learning_rate=3e-4)
    return preset, sizes | {name: value for name, value in wished.items() if value is not None}
