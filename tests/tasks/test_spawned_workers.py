"""What processes that read the data get where they are spawned: items, and no model."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from vision_ttt.recipes import resolve

CROPS = {"outputs": 16, "hidden_dim": 24, "bottleneck_dim": 8, "local_crops": 3, "ema_decay": 0.9}
TASKS = {
    "classification": {},
    "naflex": {"task": "classification", "naflex": 16},
    "dino": {"drop_path": 0.0, "image_size": 16, **CROPS},
    "masked-images": {},
    "distill": {"teacher": "vittt_nano_patch4_32.digits"},
    "diffusion": {
        **{"model": "dit3_nano_patch4_32", "drop_path": None, "image_size": 16},
        "arguments": {"hidden_size": 32, "depth": 1, "num_heads": 2},
    },
}


@pytest.mark.parametrize("name", TASKS)
def test_spawned_workers_make_the_same_batch(name: str, tiny_fields: Callable[..., dict]) -> None:
    if name == "dino":
        pytest.importorskip("lightly")
    config = resolve(tiny_fields(**{"task": name, **TASKS[name]}))
    task = config.task.open(config)
    task.prepare(task.build_model(config.model.name, task.model_arguments()))
    items, collate = (bytes(ForkingPickler.dumps(x)) for x in (task.train_set, task.collate))
    assert len(collate) < 1000
    batches = [
        function([own[n] for n in (0, 3)])
        for own, function in (
            (task.train_set, task.collate),
            (pickle.loads(items), pickle.loads(collate)),
        )
    ]
    torch.testing.assert_close(*batches, rtol=0, atol=0)
    assert batches[0]["indices"].tolist() == [0, 3]
