"""`vision-ttt eval CHECKPOINT [--dataset …]`."""

import dataclasses
import json
from typing import Any

import jsonargparse
from rich.console import Console
from rich.table import Table

from vision_ttt.cli.fast_model import fast_model
from vision_ttt.data import (
    DatasetError,
    DatasetSpec,
    Share,
    evaluation_transform,
    make_loader,
    open_dataset,
    with_transform,
)
from vision_ttt.engine import Evaluation, ModelMetadata, evaluate, load_model
from vision_ttt.engine.evaluate import BadImages
from vision_ttt.engine.inputs import even_order
from vision_ttt.engine.parallel import all_names, make_accelerator


def run(arguments: jsonargparse.Namespace) -> int:
    """Evaluate and print loss, accuracy and the accuracy of each class."""
    model, metadata = load_model(arguments.checkpoint)
    data = open_dataset(_spec(arguments, metadata))
    if data.classes != metadata.classes:
        differing = sorted(set(data.classes) ^ set(metadata.classes)) or ["their order"]
        raise DatasetError(
            f"{arguments.checkpoint} has {len(metadata.classes)} classes and the dataset"
            f" {len(data.classes)}; they differ in {', '.join(differing[:10])}"
        )
    images = with_transform(
        data.part(arguments.split), evaluation_transform(metadata.input), 0, arguments.num_workers
    )
    accelerator = make_accelerator()
    loader = make_loader(
        images,
        arguments.batch_size,
        num_workers=arguments.num_workers,
        order=even_order(images, Share(accelerator.process_index, accelerator.num_processes)),
        image_shape=metadata.input["input_size"],
    )
    model, precision = fast_model(model, accelerator.device, arguments.dtype)
    bad_images = BadImages(arguments.skip_bad)
    evaluation = evaluate(model, loader, accelerator, bad_images=bad_images, precision=precision)
    bad_images.names[:] = all_names(bad_images.names, accelerator)
    if not accelerator.is_main_process:
        return 0
    report = _report(evaluation, metadata, bad_images)
    console = Console()
    if arguments.json:
        console.print_json(json.dumps(report), highlight=False)
    else:
        _show(console, report)
    return 0


def _spec(arguments: jsonargparse.Namespace, metadata: ModelMetadata) -> DatasetSpec:
    if arguments.dataset is not None:
        return DatasetSpec(
            arguments.dataset,
            dataset_root=arguments.dataset_root,
            num_classes=len(metadata.classes),
        )
    try:
        spec = DatasetSpec(**metadata.dataset)
    except TypeError as error:
        raise DatasetError("the checkpoint does not tell its dataset; give --dataset") from error
    if arguments.dataset_root is not None:
        spec = dataclasses.replace(spec, dataset_root=arguments.dataset_root)
    return spec


def _report(
    evaluation: Evaluation, metadata: ModelMetadata, bad_images: BadImages
) -> dict[str, Any]:
    counts = evaluation.confusion.sum(dim=1).tolist()
    correct = evaluation.confusion.diagonal().tolist()
    return {
        "model": metadata.model,
        "images": len(evaluation.targets),
        "loss": evaluation.loss,
        "accuracy": evaluation.accuracy,
        "top5_accuracy": evaluation.top5_accuracy,
        "classes": [
            {"class": name, "images": count, "accuracy": right / count if count else None}
            for name, count, right in zip(metadata.classes, counts, correct, strict=True)
        ],
        "skipped": bad_images.names,
    }


def _show(console: Console, report: dict[str, Any]) -> None:
    table = Table("class", title=report["model"])
    table.add_column("images", justify="right")
    table.add_column("accuracy", justify="right")
    for row in report["classes"]:
        accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
        table.add_row(row["class"], str(row["images"]), accuracy)
    table.add_section()
    table.add_row("all", str(report["images"]), f"{report['accuracy']:.2%}")
    console.print(table)
    console.print(
        f"loss {report['loss']:.4f}, top-5 accuracy {report['top5_accuracy']:.2%}", highlight=False
    )
    if report["skipped"]:
        console.print(f"{len(report['skipped'])} images skipped", highlight=False)
