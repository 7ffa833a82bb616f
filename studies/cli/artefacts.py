"""`python -m studies artefacts CHECKPOINT…`: Mamba-Reg's Table 1."""

from collections.abc import Iterator

import jsonargparse
import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from torch.utils.data import IterableDataset

from studies.artefacts import share_accuracies
from vision_ttt import tasks
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.data import DatasetError
from vision_ttt.errors import UserError
from vision_ttt.tasks.images.task import ImageTask


def run(arguments: jsonargparse.Namespace) -> int:
    """Show the accuracies of each checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: dict[str, list[str]] = {}
    for checkpoint in arguments.checkpoints:
        model, metadata = tasks.load_model(checkpoint)
        changes = {} if arguments.dataset is None else {"dataset": arguments.dataset}
        task = tasks.find(metadata.task["name"]).reopen(
            metadata, changes, part="test", precision="float32", num_workers=0
        )
        try:
            found = share_accuracies(model.to(device), _batches(task, arguments, device))
        except (TypeError, ValueError) as error:
            raise UserError(f"{checkpoint}: {error}") from error
        for name, accuracy in found.items():
            rows.setdefault(name, []).append(f"{accuracy:.1%}")
    table = Table("feature", title="Accuracy from some of the image tokens (Mamba-Reg, Table 1)")
    for checkpoint in arguments.checkpoints:
        table.add_column(checkpoint, justify="right")
    for name, accuracies in rows.items():
        table.add_row(name, *accuracies)
    print_whole(table)
    return 0


def _batches(
    task: ImageTask, arguments: jsonargparse.Namespace, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(task.test_set, IterableDataset):
        raise DatasetError(f"{task.source.dataset} can only be read in order; name a folder")
    size = len(task.test_set)
    count = size if arguments.images is None else min(arguments.images, size)
    places = np.linspace(0, size - 1, count).astype(int)
    for some in np.array_split(places, -(-count // arguments.batch_size)):
        batch = task.collate([task.test_set[int(place)] for place in some])
        if batch["damaged"]:
            raise batch["damaged"][0]
        yield batch["images"].to(device), batch["targets"].to(device)
