"""`vision-ttt predict IMAGE… --checkpoint C`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import torch
from rich.console import Console
from rich.table import Table

from vision_ttt.cli.main import CommandParser
from vision_ttt.data import ImageError, evaluation_transform, find_images, open_image
from vision_ttt.engine import load_model
from vision_ttt.errors import UserError


def add_arguments(parser: CommandParser) -> None:
    """Declare the images, the checkpoint and the form of the answer."""
    parser.add_argument(
        "images", type=str, nargs="+", help="image files, or folders for all images in them"
    )
    parser.add_argument("--checkpoint", type=str, required=True, help="path of a last.safetensors")
    parser.add_argument("--topk", type=int, default=5, help="classes told per image")
    parser.add_argument("--json", type=bool, default=False, help="print JSON, not tables")
    parser.add_argument(
        "--skip-bad",
        type=bool,
        default=False,
        help="go on where an image does not decode, and name and count it; otherwise stop",
    )


def run(arguments: jsonargparse.Namespace) -> int:
    """Print the most probable classes of each image."""
    if arguments.topk < 1:
        raise UserError(f"topk is {arguments.topk}; it must be at least 1")
    model, metadata = load_model(arguments.checkpoint)
    transform = evaluation_transform(metadata.input)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    topk = min(arguments.topk, len(metadata.classes))
    console, errors = Console(), Console(stderr=True)

    predictions: list[dict[str, Any]] = []
    skipped: list[str] = []
    for path in _files(arguments.images):
        try:
            image = transform(open_image(path))
        except ImageError as error:
            if not arguments.skip_bad:
                raise
            skipped.append(str(path))
            errors.print(f"skipped: {error}", markup=False, highlight=False, soft_wrap=True)
            continue
        with torch.inference_mode():
            probabilities = model(image[None].to(device)).float().softmax(dim=-1)[0]
        if not torch.isfinite(probabilities).all():
            raise UserError(
                f"{arguments.checkpoint} predicts NaN for {path}: its weights are damaged"
            )
        best = [
            {"class": metadata.classes[index], "probability": probability}
            for probability, index in zip(
                *(values.tolist() for values in probabilities.topk(topk)), strict=True
            )
        ]
        predictions.append({"image": str(path), "top": best})
        if not arguments.json:
            _show(console, predictions[-1])
    if arguments.json:
        answer = {"predictions": predictions, "skipped": skipped}
        console.print_json(json.dumps(answer), highlight=False)
    if skipped:
        total = len(skipped) + len(predictions)
        errors.print(f"{len(skipped)} of {total} images skipped", highlight=False)
    if not predictions:
        raise UserError(f"none of the {len(skipped)} images could be decoded")
    return 0


def _files(images: Sequence[str]) -> Iterator[Path]:
    for image in images:
        path = Path(image)
        if path.is_dir():
            yield from find_images(path)
        else:
            yield path


def _show(console: Console, prediction: dict[str, Any]) -> None:
    table = Table(title=prediction["image"], title_justify="left")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for entry in prediction["top"]:
        table.add_row(entry["class"], f"{entry['probability']:.2%}")
    console.print(table)
