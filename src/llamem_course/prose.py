"""What a notebook's text claims: asserted with the parameters it was written for, told as found with others."""

from collections.abc import Callable


def claims(as_written: bool) -> Callable[[bool, str], None]:
    """Return `claim(holds, sentence)`, which checks a sentence of the text: a clause that can follow "it holds that".

    `as_written` says whether the notebook runs with its own parameters, `(tokens, chip) == (8192, "v5e-1")`. Then a
    sentence that does not hold raises AssertionError. With other parameters it is printed that it does not hold here,
    and the notebook runs on.
    """

    def claim(holds: bool, sentence: str) -> None:
        if not holds and as_written:
            raise AssertionError(f"the text says that {sentence}, and it is not so")
        if not holds:
            print(f"With these parameters it is otherwise: it does not hold that {sentence}.")

    return claim
