"""Export to timm's folder: `model.safetensors` and `config.json`, as on the Hugging Face hub."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
from torch import nn

from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.tensor_files import HUB_CONFIG, HUB_WEIGHTS
from vision_ttt.export.inputs import InputShapes
from vision_ttt.export.verification import Agreement, verify
from vision_ttt.files import write_bytes


def export_timm(model: nn.Module, metadata: ModelMetadata, folder: Path) -> Agreement:
    """Write ``model`` as a folder that timm loads, after verifying both of timm's ways to load it::

        import vision_ttt  # registers the model
        timm.create_model("local-dir:FOLDER", pretrained=True)
        overlay = dict(file="FOLDER/model.safetensors", num_classes=N)
        timm.create_model(NAME, pretrained=True, pretrained_cfg_overlay=overlay, **model_args)

    Pushed to the hub unchanged, it loads with ``"hf-hub:OWNER/NAME"``. The automatic classes of
    transformers load it from both places, too.

    Raises:
        ExportError: the model that timm loads computes other logits.
        OSError: the folder cannot be written.
    """
    shapes = InputShapes.of(model, metadata.carried["input"]["input_size"]).to_verify()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        # Other libraries of the hub require the format's name.
        weights = {name: x.contiguous() for name, x in model.state_dict().items()}
        content = safetensors.torch.save(weights, metadata={"format": "pt"})
        (made / HUB_WEIGHTS).write_bytes(content)
        (made / HUB_CONFIG).write_text(json.dumps(_config(model, metadata), indent=2))
        agreement = verify(_from_folder(made), model, shapes, str(folder), tolerance=1e-6)
        verify(_by_overlay(made, metadata), model, shapes, str(folder), tolerance=1e-6)
        folder.mkdir(exist_ok=True)
        for file in (HUB_WEIGHTS, HUB_CONFIG):
            write_bytes(folder / file, (made / file).read_bytes())
    return agreement


def _config(model: nn.Module, metadata: ModelMetadata) -> dict[str, Any]:
    """The content of config.json for timm's `local-dir:` and `hf-hub:`, and for transformers."""
    own = model.pretrained_cfg
    # The number of classes is a top-level key, which transformers passes to timm with model_args.
    # Neither is null one: for timm's factory it is the default, for a folder an argument.
    given = metadata.model_args.items()
    arguments = {key: x for key, x in given if key != "num_classes" and x is not None}
    kept = ("classifier", "first_conv", "fixed_input_size", "license")
    return {
        "architecture": metadata.model,
        "num_classes": len(metadata.carried["classes"]),
        "num_features": model.num_features,
        "label_names": list(metadata.carried["classes"]),
        "model_args": arguments,
        "pretrained_cfg": {
            **{name: own[name] for name in kept if own.get(name) is not None},
            **metadata.carried["input"],
            "num_classes": len(metadata.carried["classes"]),
        },
    }


def _from_folder(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _by_overlay(folder: Path, metadata: ModelMetadata) -> nn.Module:
    # Without num_classes timm would assume the registered number of classes and drop the
    # classifier.
    overlay = {"file": str(folder / HUB_WEIGHTS), "num_classes": len(metadata.carried["classes"])}
    return timm.create_model(
        metadata.model, pretrained=True, pretrained_cfg_overlay=overlay, **metadata.model_args
    ).eval()
