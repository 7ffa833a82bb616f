"""The tasks that models are trained for: a package per task, and a table of all tasks.

A task's section of the config (:class:`vision_ttt.engine.config.TaskSection`) leads to everything
else of it: data, model, loss, evaluation, checkpoints, prediction, report. A new task is a folder
next to these and a line in `TASKS`; another package calls :func:`register`.
"""

import importlib
from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports
from vision_ttt.engine.config import ConfigError, TaskSection
from vision_ttt.errors import suggestions

if TYPE_CHECKING:
    from vision_ttt.tasks.checkpoints import load_model

__all__ = ["TASKS", "find", "load_model", "register"]

TASKS: dict[str, str | type[TaskSection]] = {
    "classification": "vision_ttt.tasks.classification.config:ClassificationSection",
    "detection": "vision_ttt.tasks.detection.config:DetectionSection",
    "diffusion": "vision_ttt.tasks.diffusion.config:DiffusionSection",
    "dino": "vision_ttt.tasks.dino.config:DinoSection",
    "distill": "vision_ttt.tasks.distill.config:DistillSection",
    "language": "vision_ttt.tasks.language.config:LanguageSection",
    "masked-images": "vision_ttt.tasks.masked_images.config:MaskedImagesSection",
    "segmentation": "vision_ttt.tasks.segmentation.config:SegmentationSection",
}
"""Name of each task → its section of the config, as MODULE:CLASS where it is not imported yet."""

# Recipes are read, and refused, without PyTorch.
lazy_exports(__name__, {"load_model": "checkpoints"})


def find(name: object) -> type[TaskSection]:
    """Return the section of the task called `name`.

    Raises:
        ConfigError: there is no such task; names the nearest.
    """
    if not isinstance(name, str) or name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; {suggestions(str(name), TASKS)}")
    section = TASKS[name]
    if isinstance(section, str):
        module, _, attribute = section.partition(":")
        section = TASKS[name] = getattr(importlib.import_module(module), attribute)
    return section


def register(section: type[TaskSection]) -> type[TaskSection]:
    """Add a task of another package to the table; a class decorator.

    Raises:
        ValueError: another task has its name.
    """
    name = section().name
    if name in TASKS and find(name) is not section:
        raise ValueError(f"there is a task {name!r} already: {find(name).__qualname__}")
    TASKS[name] = section
    return section
