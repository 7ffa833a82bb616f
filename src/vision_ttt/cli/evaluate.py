"""`vision-ttt eval CHECKPOINT [--dataset …]`."""

import json
import math
from pathlib import Path

import jsonargparse
from accelerate.utils import send_to_device

from vision_ttt import tasks
from vision_ttt.cli.fast_model import fast_model
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.loaders import evaluation_loader
from vision_ttt.engine.non_finite_search import Calls, find_in_forward, watched_calls
from vision_ttt.engine.parallel import all_names, make_accelerator
from vision_ttt.engine.section import field_types
from vision_ttt.errors import DamagedModel, UserError

NOT_FINITE = 1  # exit code: the model computes NaN or infinity


def run(arguments: jsonargparse.Namespace) -> int:
    """Evaluate a checkpoint's model as its task does, and print the figures.

    Returns:
        The exit code; `NOT_FINITE` where the model computes NaN or infinity.
    """
    model, metadata = tasks.load_model(arguments.checkpoint, task=None)
    if arguments.fid is not None:
        return _frechet_distance(metadata, arguments)
    accelerator = make_accelerator()
    section = tasks.find(metadata.task["name"])
    if section.PACKABLE:
        model, precision = fast_model(model, accelerator.device, arguments.dtype)
    else:
        model, precision = model.to(accelerator.device), arguments.dtype
    names = ("dataset", "dataset_root", "evaluation")
    changes = {name: arguments[name] for name in names if arguments[name] is not None}
    if "evaluation" in changes and "evaluation" not in field_types(section.DATA):
        raise UserError(
            f"--evaluation is {arguments.evaluation}, but the checkpoint holds {section.HOLDS}"
        )
    task = section.reopen(
        metadata,
        changes,
        part=arguments.split,
        precision=precision,
        num_workers=arguments.num_workers,
    )
    loader = evaluation_loader(
        task.test_set,
        arguments.batch_size,
        task.collate,
        accelerator,
        num_workers=arguments.num_workers,
    )
    damaged = DamagedItems(arguments.skip_bad)
    with watched_calls(model) as calls:
        try:
            evaluation = task.evaluate(
                model, loader, accelerator, damaged=damaged, between=lambda: None
            )
        except DamagedModel as error:
            return _refuse(arguments.checkpoint, calls, str(error))
    wrong = [f"{name} is {x}" for name, x in evaluation.metrics.items() if not math.isfinite(x)]
    if wrong or not calls.are_finite:
        return _refuse(
            arguments.checkpoint, calls, ", ".join(wrong) or "the outputs are not finite"
        )
    skipped = all_names(damaged.names)
    if not accelerator.is_main_process:
        return 0
    figures = task.figures(evaluation)
    console = plain_console()
    if arguments.json:
        content = {"model": metadata.model, **figures, "skipped": skipped}
        console.print_json(json.dumps(content), highlight=False)
        return 0
    console.print(task.table(metadata.model, figures))
    if skipped:
        console.print(f"{len(skipped)} {task.unit} skipped")
    return 0


def _frechet_distance(metadata: ModelMetadata, arguments: jsonargparse.Namespace) -> int:
    """Compare images that a diffusion model made with those of its data, and print how far."""
    if metadata.task["name"] != "diffusion":
        raise UserError(
            f"--fid requires a diffusion model; the checkpoint's task is {metadata.task['name']}"
        )
    from vision_ttt.tasks.diffusion.frechet import measure_frechet

    names = ("dataset", "dataset_root")
    found = measure_frechet(
        metadata,
        Path(arguments.fid),
        features=arguments.fid_features,
        changes={name: arguments[name] for name in names if arguments[name] is not None},
        part=arguments.split,
        batch_size=arguments.batch_size,
    )
    console = plain_console()
    if arguments.json:
        console.print_json(json.dumps({"model": metadata.model, **found}), highlight=False)
    else:
        console.say(
            f"{metadata.model}: Fréchet distance {found['frechet_distance']:.4g} of"
            f" {found['made']} images to {found['real']} of the data ({found['features']})"
        )
    return 0


def _refuse(checkpoint: str, calls: Calls, reason: str) -> int:
    """Say what is not finite, and where in the model that begins; return the exit code."""
    model, _ = tasks.load_model(checkpoint, task=None)
    arguments, keywords = send_to_device((calls.arguments, dict(calls.keywords)), "cpu")
    found = find_in_forward(model, lambda: model(*arguments, **keywords))
    where = "the outputs of all modules are finite in float32"
    if found is not None:
        where = f"NaN or infinity first appears in {found}"
    plain_console(stderr=True).say(f"error: {checkpoint} cannot be measured: {reason}; {where}")
    return NOT_FINITE
