"""What the checkpoints of image models say of themselves, for tests that write some."""

from collections.abc import Sequence
from typing import Any

from vision_ttt.engine import ModelMetadata


def describe_classifier(
    model: str, arguments: dict[str, Any], classes: Sequence[str], data_config: dict[str, Any]
) -> ModelMetadata:
    """Return the metadata of a classifier; `data_config` is timm's, of the images it expects."""
    carried = {"classes": list(classes), "input": data_config}
    return ModelMetadata({"name": "classification"}, model, arguments, carried)
