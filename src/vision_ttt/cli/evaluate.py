"""`vision-ttt eval CHECKPOINT [--dataset …]`."""

import json

import jsonargparse

from vision_ttt import tasks
from vision_ttt.cli.fast_model import fast_model
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.data import Share, make_loader
from vision_ttt.engine.damaged import DamagedItems
from vision_ttt.engine.loaders import even_order
from vision_ttt.engine.parallel import all_names, make_accelerator
from vision_ttt.engine.section import field_types
from vision_ttt.errors import UserError


def run(arguments: jsonargparse.Namespace) -> int:
    """Evaluate a checkpoint's model as its task does, and print the figures."""
    model, metadata = tasks.load_model(arguments.checkpoint, task=None)
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
    loader = make_loader(
        task.test_set,
        arguments.batch_size,
        task.collate,
        num_workers=arguments.num_workers,
        order=even_order(
            task.test_set, Share(accelerator.process_index, accelerator.num_processes)
        ),
    )
    damaged = DamagedItems(arguments.skip_bad)
    evaluation = task.evaluate(model, loader, accelerator, damaged=damaged, between=lambda: None)
    skipped = all_names(damaged.names, accelerator)
    if not accelerator.is_main_process:
        return 0
    figures = task.figures(evaluation)
    console = plain_console()
    if arguments.json:
        told = {"model": metadata.model, **figures, "skipped": skipped}
        console.print_json(json.dumps(told), highlight=False)
        return 0
    console.print(task.table(metadata.model, figures))
    if skipped:
        console.print(f"{len(skipped)} {task.unit} skipped", highlight=False)
    return 0
