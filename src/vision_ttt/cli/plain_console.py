"""A terminal that shows text as it is: names of files and classes are no markup."""

from vision_ttt.safe_console import SafeConsole


def plain_console(*, stderr: bool = False, width: int | None = None) -> SafeConsole:
    """Return a console on which neither [red] nor :cat: means anything, in tables neither."""
    return SafeConsole(stderr=stderr, width=width, markup=False, emoji=False)
