"""`vision-ttt predict FILE… --checkpoint C`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse

from vision_ttt import tasks
from vision_ttt.cli import predict_whole
from vision_ttt.cli.checks import check_replaceable
from vision_ttt.cli.device import find_device
from vision_ttt.cli.fast_model import fast_model
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.engine.csv_text import csv_text
from vision_ttt.errors import UserError
from vision_ttt.files import write_bytes


def run(arguments: jsonargparse.Namespace) -> int:
    """Show or write what the checkpoint's model predicts for each file."""
    if arguments.whole:
        return predict_whole.run(arguments)
    output = None if arguments.output is None else Path(arguments.output)
    device = find_device(arguments.device)
    model, metadata = tasks.load_model(arguments.checkpoint, task=None)
    section = tasks.find(metadata.task["name"])
    model, precision = fast_model(model, device, arguments.dtype)
    predictor = section.predictor(
        model,
        metadata,
        device=device,
        precision=precision,
        topk=arguments.topk,
        batch_size=arguments.batch_size,
        num_workers=arguments.num_workers,
    )
    files = predictor.find(arguments.files)
    folders = {"pictures": arguments.pictures, "masks": arguments.masks}
    folders = {drawing: folder for drawing, folder in folders.items() if folder is not None}
    for drawing in folders:
        if drawing not in predictor.drawings:
            raise UserError(f"--{drawing} is given, but the checkpoint holds {section.HOLDS}")
    drawn = {
        drawing: _drawing_files(files, arguments.files, folder, overwrite=arguments.overwrite)
        for drawing, folder in folders.items()
    }
    console, errors = plain_console(), plain_console(stderr=True)

    predictions: list[dict[str, Any]] = []
    skipped: list[str] = []
    with progress_on(errors) as progress:
        bar = progress.add_task(predictor.unit, total=len(files))
        for found, damaged in predictor.predict(files):
            for error in damaged:
                if not arguments.skip_bad:
                    if len(files) > 1:
                        error.name_flag()
                    raise error
                skipped.append(error.name)
                errors.say(f"skipped: {error}")
            predictions += found
            for drawing, places in drawn.items():
                for prediction in found:
                    place = places[predictor.file_of(prediction)]
                    write_bytes(place, predictor.draw(drawing, prediction))
            progress.advance(bar, len(found) + len(damaged))
    if skipped:
        errors.print(f"{len(skipped)} of {len(files)} {predictor.unit} skipped")
    if not predictions:
        raise UserError(f"none of the {len(skipped)} {predictor.unit} can be read")
    for drawing, folder in folders.items():
        console.say(f"{folder}: {len(predictions)} {drawing}")
    answer = json.dumps(predictor.answer(predictions, skipped), indent=2)
    if output is not None:
        rows = [row for prediction in predictions for row in predictor.rows(prediction)]
        text = (
            csv_text(predictor.columns, rows) if output.suffix.lower() == ".csv" else answer + "\n"
        )
        # The bytes of a file's name need not be text.
        write_bytes(output, text.encode(errors="surrogateescape"))
        console.say(f"{output}: {len(predictions)} {predictor.unit}")
    elif arguments.json:
        console.print_json(answer, highlight=False)
    elif not drawn:
        for prediction in predictions:
            console.print(predictor.table(prediction))
    return 0


def _drawing_files(
    files: Sequence[Path], given: Sequence[str], folder: str, *, overwrite: bool
) -> dict[str, Path]:
    """Return for each file where its drawing is written, none over another; make the folders.

    The sub-folders of a given folder are kept.

    Raises:
        UserError: a drawing already exists, and may not be overwritten, or is one of the files.
    """
    sources = {file.resolve() for file in files}
    taken: dict[Path, Path] = {}
    for file in files:
        place = Path(folder) / _below(file, given).with_suffix(".png")
        path, number = place, 2
        while taken.get(path, file) != file:
            path = place.with_stem(f"{place.stem}-{number}")
            number += 1
        if path.resolve() in sources:
            raise UserError(f"the picture {path} would replace one of the files; name a new folder")
        if path.exists():
            check_replaceable("the picture", str(path), overwrite=overwrite)
        taken[path] = file
    for path in taken:
        path.parent.mkdir(parents=True, exist_ok=True)
    return {str(file): path for path, file in taken.items()}


def _below(file: Path, given: Sequence[str]) -> Path:
    """Return a file's path below the given folder that it is in; its name, if it is in none."""
    for root in map(Path, given):
        if root in file.parents and ".." not in file.relative_to(root).parts:
            return file.relative_to(root)
    return Path(file.name)
