"""Tiny checkpoints that the page may offer, and which tests need the extra [app]."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from described_models import describe_classifier
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.tasks.images.models import data_config

collect_ignore = [
    *(["test_app_browser.py", "test_app_page.py"] if find_spec("gradio") is None else []),
    *(["test_app_samples.py"] if find_spec("skimage") is None else []),
]

NANO = {"depth": 2, "embed_dim": 32, "num_heads": 1, "img_size": 32}
CLASSES = ("dark", "light", "striped")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Vittt of two blocks on 8 × 8 tokens."""
    torch.manual_seed(0)
    arguments = {**NANO, "num_classes": len(CLASSES)}
    model = build_model("vittt_nano_patch4_32", arguments)
    torch.nn.init.normal_(model.head.weight)
    config = data_config(model, 32)
    path = tmp_path_factory.mktemp("run") / "best.safetensors"
    described = describe_classifier("vittt_nano_patch4_32", arguments, CLASSES, config)
    save_weights(path, model.state_dict(), described)
    return path


@pytest.fixture(scope="session")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segmenter of two classes around a Vittt of four blocks."""
    building = pytest.importorskip("vision_ttt.dense.building")
    pytest.importorskip("faster_coco_eval")
    torch.manual_seed(0)
    parts = {"adapter": {"conv_width": 8, "heads": 2}, "channels": 16, "auxiliary_channels": 8}
    arguments = {"num_classes": 2, "dense": parts, "depth": 4, "embed_dim": 32, "num_heads": 2}
    model = building.build_segmenter("vittt_nano_patch4_32", **arguments)
    shown = {"mean": [0.5] * 3, "std": [0.25] * 3, "longer_side": 64, "test_shorter_side": 32}
    carried = {
        "classes": ["ground", "thing"],
        "palette": [[90, 140, 90], [200, 60, 60]],
        "input": {**shown, "evaluation": "whole", "window": 32, "stride": 32},
    }
    described = ModelMetadata({"name": "segmentation"}, "vittt_nano_patch4_32", arguments, carried)
    path = tmp_path_factory.mktemp("segmenter") / "last.safetensors"
    save_weights(path, model.state_dict(), described)
    return path


@pytest.fixture(scope="session")
def pictures() -> list[Image.Image]:
    """Eight pictures of noise, 40 × 24 pixels."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (8, 24, 40, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]
