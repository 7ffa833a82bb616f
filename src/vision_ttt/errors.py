"""The errors a user can cause and mend: the command line shows only their message."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class UserError(Exception):
    """A request that cannot be fulfilled; the message names the value and the accepted ones.

    The subclasses, which are next to their owners, also derive from the built-in error they refine
    (`ValueError` for the most part), so that library users need not know this class.
    """


class DamagedItem(UserError, ValueError):
    """An item of a dataset that cannot be read. `name` is its file or its place in the dataset.

    Worker processes send it in the item's place, so that the run decides what is done about it.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple:
        # By default, an exception is unpickled from its message alone.
        return type(self), (str(self), self.name)

    def name_flag(self) -> None:
        """Add to the message the flag that leaves out what cannot be read."""
        self.args = (f"{self}; --skip-bad leaves out what cannot be read",)


class DamagedModel(UserError, ArithmeticError):
    """A model computes NaN or infinity; what would be measured of it means nothing."""


class LoaderError(UserError, RuntimeError):
    """The processes that read the data hang or died."""


class Interrupted(Exception):
    """Training was asked to stop and left a complete checkpoint; the message says how to resume."""


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Tell of a worker's death, which PyTorch raises wherever the main process then is.

    Raises:
        LoaderError: a worker process died.
    """
    try:
        yield
    except RuntimeError as error:
        message = str(error)
        died = "exited unexpectedly" in message or "is killed by signal" in message
        if not died or isinstance(error, LoaderError):
            raise
        raise LoaderError(f"a worker process died: {message.splitlines()[0]}") from error


def reason_of(error: BaseException) -> str:
    """Return an error's message as one line, or the error's name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def shortened(value: object) -> str:
    """Return a value for a message, cut where it has more than 60 characters."""
    try:
        text = str(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


def some(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def suggestions(received: str, accepted: Iterable[str]) -> str:
    """Return "nearest: a, b, c": the up to three of `accepted` that look most like `received`.

    Entries whose initials are `received` come first: --learning-rate for --lr. If no entry is
    similar, the answer is "accepted: " and all entries, or the first dozen of them.
    """
    received = received.lstrip("-")
    entries = {each.lstrip("-"): each for each in sorted(accepted)}
    initials = {each: "".join(re.findall(r"(?<![a-z0-9])[a-z0-9]", each)) for each in entries}
    short = [each for each in entries if initials[each] == received]
    alike = difflib.get_close_matches(received, entries, n=3, cutoff=0.5)
    close = list(dict.fromkeys([*short, *alike]))[:3]
    if close:
        return "nearest: " + ", ".join(entries[each] for each in close)
    first = list(entries.values())[:12]
    return "accepted: " + ", ".join([*first, "…"] if len(entries) > 12 else first)
