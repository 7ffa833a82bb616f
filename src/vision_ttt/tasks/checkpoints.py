"""Models from the files that training leaves, whatever they were trained for."""

from pathlib import Path

from torch import nn

from vision_ttt import tasks
from vision_ttt.engine.bounded_building import no_larger_than
from vision_ttt.engine.building import load_weights
from vision_ttt.engine.checkpoint import ModelMetadata, read_weights
from vision_ttt.engine.tensor_files import CheckpointError
from vision_ttt.errors import UserError
from vision_ttt.extras import MissingPackageError
from vision_ttt.tasks.classification.timm_folder import is_timm_folder, read_timm_folder


def load_model(
    path: str | Path, *, task: str | None = "classification"
) -> tuple[nn.Module, ModelMetadata]:
    """Build the model that a weights file describes and load it strictly, to evaluate on the CPU.

    Args:
        path: of the file; of a run's checkpoints, the files that it resumes from, too; or of a
            folder that :func:`vision_ttt.tasks.classification.timm_folder.read_timm_folder` reads.
        task: what the model has to be trained for; None for any task.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated, damaged, a pickle (which is not opened), not one of
            ours, its weights are not those of the model it names, or the model is another task's.
    """
    path = Path(path)
    of_timm = is_timm_folder(path)
    weights, metadata = read_timm_folder(path) if of_timm else read_weights(path)
    try:
        name = metadata.task["name"]
        section = tasks.find(name)
        if task not in (None, name, *section.stands_for(metadata)):
            raise CheckpointError(f"{path} holds {section.HOLDS}, not {tasks.find(task).HOLDS}")
        with no_larger_than(weights):
            model = section.rebuild(metadata)
        load_weights(model, weights, "its content")
    except (CheckpointError, MissingPackageError):
        raise
    except UserError as error:
        raise CheckpointError(f"checkpoint {path}: {error}") from error
    # A damaged or foreign description can make constructors raise any error.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        described = "a damaged config.json" if of_timm else "damaged vision-ttt metadata"
        raise CheckpointError(f"{path} has {described}: {reason}") from error
    return model.eval(), metadata
