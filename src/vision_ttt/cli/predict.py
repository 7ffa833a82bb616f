"""`vision-ttt predict IMAGE… --checkpoint C`."""

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset

from vision_ttt.cli.fast_model import fast_model
from vision_ttt.data import (
    ImageError,
    TransformedImages,
    evaluation_transform,
    find_images,
    make_loader,
    open_image,
    watched,
)
from vision_ttt.engine import ModelMetadata, load_model
from vision_ttt.engine.evaluate import autocast
from vision_ttt.engine.files import write_bytes
from vision_ttt.errors import UserError

Prediction = dict[str, Any]
"""image: its path; top: class and probability of the most probable classes, best first."""


def run(arguments: jsonargparse.Namespace) -> int:
    """Tell or write the most probable classes of each image."""
    output = None if arguments.output is None else Path(arguments.output)
    device = _device(arguments.device)
    model, metadata = load_model(arguments.checkpoint)
    files = list(_files(arguments.images))
    model, precision = fast_model(model, device, arguments.dtype)
    console, errors = Console(), Console(stderr=True)

    predictions: list[Prediction] = []
    skipped: list[str] = []
    columns = TextColumn("images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    quiet = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
        bar = progress.add_task("", total=len(files))
        batches = _batches(model, metadata, files, arguments, device, precision)
        for indices, probabilities, bad in batches:
            for name, reason in bad:
                error = ImageError(name, reason)
                if not arguments.skip_bad:
                    raise error
                skipped.append(name)
                errors.print(f"skipped: {error}", markup=False, highlight=False, soft_wrap=True)
            for index, of_image in zip(indices.tolist(), probabilities, strict=True):
                if not torch.isfinite(of_image).all():
                    raise UserError(
                        f"{arguments.checkpoint} predicts NaN for {files[index]}: its weights are"
                        " damaged"
                    )
                predictions.append(_prediction(files[index], of_image, metadata, arguments.topk))
            progress.advance(bar, len(indices) + len(bad))
    if skipped:
        errors.print(f"{len(skipped)} of {len(files)} images skipped", highlight=False)
    if not predictions:
        raise UserError(f"none of the {len(skipped)} images could be decoded")
    answer = json.dumps({"predictions": predictions, "skipped": skipped}, indent=2)
    if output is not None:
        text = _csv(predictions) if output.suffix.lower() == ".csv" else answer + "\n"
        # The bytes of a file's name need not be text.
        write_bytes(output, text.encode(errors="surrogateescape"))
        console.print(f"{output}: {len(predictions)} images", highlight=False, soft_wrap=True)
    elif arguments.json:
        console.print_json(answer, highlight=False)
    else:
        for prediction in predictions:
            _show(console, prediction)
    return 0


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device).cpu()  # "meta" is no device to compute on
    # PyTorch without CUDA asserts, and looks for the modules of devices that others provide.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = re.split(r"\. |\n", str(error).strip(), maxsplit=1)[0]
        raise UserError(
            f"device {name!r} cannot be used: {reason}; accepted here: {', '.join(_devices())}"
        ) from error
    return device


def _devices() -> list[str]:
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator().type
    return ["cpu", *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]


def _files(images: Sequence[str]) -> Iterator[Path]:
    for image in images:
        path = Path(image)
        if path.is_dir():
            yield from find_images(path)
        else:
            yield path


class _ImageFiles(Dataset[tuple[Image.Image, int]]):
    """The images of files; nobody knows their classes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            return open_image(self.files[index]), -1
        except FileNotFoundError as error:
            raise ImageError(str(self.files[index]), "it is there no more") from error


def _batches(
    model: nn.Module,
    metadata: ModelMetadata,
    files: Sequence[Path],
    arguments: jsonargparse.Namespace,
    device: torch.device,
    precision: str,
) -> Iterator[tuple[Tensor, Tensor, list[tuple[str, str]]]]:
    """Per batch the places of its images [B], their probabilities [B, C] and the bad ones."""
    loader = make_loader(
        TransformedImages(_ImageFiles(files), evaluation_transform(metadata.input)),
        arguments.batch_size,
        num_workers=arguments.num_workers,
        image_shape=metadata.input["input_size"],
    )
    for batch in watched(loader):
        images = batch["images"]
        probabilities = torch.empty(0, len(metadata.classes))
        if len(images):
            with torch.inference_mode(), autocast(device, precision):
                probabilities = model(images.to(device)).float().softmax(dim=-1).cpu()
        yield batch["indices"], probabilities, batch["bad"]


def _prediction(
    path: Path, probabilities: Tensor, metadata: ModelMetadata, topk: int
) -> Prediction:
    best = probabilities.topk(min(topk, len(metadata.classes)))
    return {
        "image": str(path),
        "top": [
            {"class": metadata.classes[index], "probability": probability}
            for probability, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ],
    }


def _csv(predictions: Sequence[Prediction]) -> str:
    """One row per image: image, class_1, probability_1, class_2, …"""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ranks = range(1, len(predictions[0]["top"]) + 1)
    writer.writerow(["image", *(f"{name}_{n}" for n in ranks for name in ("class", "probability"))])
    for prediction in predictions:
        cells = (cell for entry in prediction["top"] for cell in entry.values())
        writer.writerow([prediction["image"], *cells])
    return text.getvalue()


def _show(console: Console, prediction: Prediction) -> None:
    table = Table(title=prediction["image"], title_justify="left")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for entry in prediction["top"]:
        table.add_row(entry["class"], f"{entry['probability']:.2%}")
    console.print(table)
