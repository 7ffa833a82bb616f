"""Portable programs in ExecuTorch, lowered as docs/with-other-tools.md says; skipped without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vision_ttt.export import InputShapes, export_program

pytestmark = pytest.mark.slow
exir = pytest.importorskip("executorch.exir", reason="pip install executorch")
runtime = pytest.importorskip("executorch.runtime")
xnnpack = pytest.importorskip("executorch.backends.xnnpack.partition.xnnpack_partitioner")


VIT3 = {"depth": 1, "embed_dim": 32, "num_heads": 1, "img_size": 20}
XNNPACK = [xnnpack.XnnpackPartitioner()]


@pytest.mark.parametrize(
    ("name", "options", "delegates"),
    [
        ("vittt_nano_patch4_32", {}, []),
        ("vittt_nano_patch4_32", {"inner_model": "mlp"}, XNNPACK),
        ("vit3_nano_patch4_32", VIT3, XNNPACK),
    ],
)
def test_a_portable_program_computes_the_models_logits(
    make_model: Callable, tmp_path: Path, name: str, options: dict, delegates: list
) -> None:
    model, metadata = make_model(name, **options)
    path = tmp_path / "model.pt2"
    export_program(model, metadata, path, InputShapes(3, 20, 20, batch_size=1), portable=True)
    with torch.no_grad():
        program = torch.export.load(path)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=delegates).to_executorch()
    loaded = runtime.Runtime.get().load_program(bytes(lowered.buffer))
    images = torch.randn(1, 3, 20, 20)
    (logits,) = loaded.load_method("forward").execute([images])
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(images), rtol=0, atol=1e-5)
