"""`python -m studies letters`: pictures of letters in a folder, to train on or to look at."""

from __future__ import annotations

import logging
from pathlib import Path

import jsonargparse

from studies.letters.dataset import BACKGROUND_NAME
from studies.letters.folders import LetterSet, holds_letters, render_letter_folder
from studies.letters.images import LetterSettings
from studies.letters.rendered_folder import SHEET_FILE
from studies.letters.sheet import letter_sheet
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.engine.locks import alone_in
from vision_ttt.errors import UserError
from vision_ttt.files import atomic_file
from vision_ttt.tasks.images.pictures import with_legend
from vision_ttt.tasks.segmentation.pictures import class_colours

_LOGGER = logging.getLogger(__name__)


def run(arguments: jsonargparse.Namespace) -> int:
    """Draw the contact sheet, and render what is not there yet."""
    folder = Path(arguments.folder)
    try:
        settings = LetterSettings(
            side=arguments.side,
            classes=arguments.classes,
            glyph=arguments.glyph,
            density=arguments.density,
            clutter=arguments.clutter,
            mark=arguments.mark,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    letters = LetterSet(
        settings, arguments.train_images, arguments.validation_images, arguments.test_images
    )
    holds_letters(folder, letters)  # refuses a folder of something else before it is touched
    try:
        with alone_in(folder, wait=False):
            _draw_sheet(folder / SHEET_FILE, settings)
            if not arguments.sheet_only:
                with progress_on(plain_console(stderr=True)) as progress:
                    bar = progress.add_task("rendering letters", total=sum(letters.images.values()))
                    render_letter_folder(
                        folder, letters, lambda done: progress.update(bar, completed=done)
                    )
                _LOGGER.info("letters in %s", folder)
    except BlockingIOError:
        raise UserError(
            f"another process renders letters in {folder}; wait for it, or choose another folder"
        ) from None
    return 0


def _draw_sheet(file: Path, settings: LetterSettings) -> None:
    """Draw some of the pictures above their labels, with the labels' names."""
    names = (BACKGROUND_NAME, *settings.names)
    colours = class_colours(names)
    sheet = with_legend(letter_sheet(settings, colours), list(zip(names, colours, strict=True)))
    with atomic_file(file) as target:
        sheet.save(target, "PNG")
    _LOGGER.info("some of the letters in %s", file)
