"""A terminal that shows text as it is: names of files and classes are no markup."""

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vision_ttt.safe_console import SafeConsole


class PlainConsole(SafeConsole):
    """A console on which neither [red] nor :cat: means anything, in tables neither."""

    def say(self, text: str) -> None:
        """Print a text that may be copied: its lines are the terminal's to wrap."""
        self.print(text, soft_wrap=True)


def plain_console(*, stderr: bool = False, width: int | None = None) -> PlainConsole:
    """Return a console of stdout or stderr."""
    return PlainConsole(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


def progress_on(console: PlainConsole) -> Progress:
    """Return bars that vanish at the end, and are not shown where `console` is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
