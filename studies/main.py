"""The command line of the studies: their commands, and those of vision-ttt beside them."""

from __future__ import annotations

from collections.abc import Sequence

from vision_ttt.cli import main as library
from vision_ttt.cli.main import Command

PROGRAM = "python -m studies"

COMMANDS = {
    "sweep": Command("studies.cli.sweep", "train every row of a comparison, over several seeds"),
    "deletion": Command("studies.cli.deletion", "measure whether maps of importance mean anything"),
    "artefacts": Command("studies.cli.artefacts", "classify by the tokens of largest norm alone"),
    "paths": Command("studies.cli.paths", "measure gradients by distance along the sequence"),
    "equations": Command("studies.cli.equations", "costs by Vision-TTT's Eqs. 13 and 14, counted"),
    "letters": Command("studies.cli.letters", "render pictures of letters into a folder"),
    "scenes": Command("studies.cli.scenes", "compare backbones on the rendered scenes"),
    "bench": Command("studies.cli.bench", "measure dense and language models and ops, show rows"),
    **{name: command for name, command in library.COMMANDS.items() if name != "bench"},
}
"""Name → command: those of the studies, then those of vision-ttt, which know the letters here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m studies`; see :func:`vision_ttt.cli.main.main`."""
    return library.main(argv, commands=COMMANDS, program=PROGRAM)
