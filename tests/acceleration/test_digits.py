"""A trained model classifies in bfloat16 as in float32."""

import pytest
import torch

from vision_ttt import for_inference, recipes
from vision_ttt.engine import train
from vision_ttt.tasks import find, load_model


@pytest.mark.slow
def test_digits_are_classified_as_in_float32(tmp_path):
    config = recipes.load("digits", {"epochs": 3, "output": str(tmp_path)})
    model, metadata = load_model(train(config).run_dir / "last.safetensors")
    task = find("classification").reopen(
        metadata, {}, part="test", precision="float32", num_workers=0
    )
    images = task.test_set
    batch = torch.stack([images[i][0] for i in range(len(images))])
    exact, rounded = (for_inference(model, dtype=dtype)(batch) for dtype in (None, torch.bfloat16))
    assert (exact - rounded).abs().max() / exact.abs().max() < 2e-2
    assert (exact.argmax(1) == rounded.argmax(1)).float().mean() >= 0.995
