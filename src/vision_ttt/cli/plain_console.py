"""A terminal that shows text as it is: names of files and classes are no markup."""

from rich.console import Console


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console on which neither [red] nor :cat: means anything, in tables neither."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False)
