"""Classification of images: cross-entropy, mixing, self-distillation, accuracy."""

from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports
from vision_ttt.tasks.classification.config import ClassificationSection

if TYPE_CHECKING:
    from vision_ttt.tasks.classification.evaluation import ClassifierEvaluation, evaluate, summarise
    from vision_ttt.tasks.classification.task import Classification

__all__ = [
    "Classification",
    "ClassificationSection",
    "ClassifierEvaluation",
    "evaluate",
    "summarise",
]

# Recipes are read, and refused, without PyTorch.
lazy_exports(
    __name__,
    {
        "Classification": "task",
        "ClassifierEvaluation": "evaluation",
        "evaluate": "evaluation",
        "summarise": "evaluation",
    },
)
