"""Real shards and a real Hugging Face dataset through timm's readers (extra [data])."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vision_ttt.data import DatasetSpec, ImageError, collate, make_loader, open_dataset
from vision_ttt.data.loading import evaluation_transform, with_transform
from vision_ttt.engine import train
from vision_ttt.recipes import resolve

INPUT = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "crop_pct": 1.0,
    "crop_mode": "center",
}


@pytest.fixture
def stream(tmp_path: Path, write_shard: Callable[..., None]) -> dict:
    """Two training shards of eight images and one for test, as timm's wds/ wants them."""
    root = tmp_path / "stream"
    info = {"splits": {}}
    for split, count in (("train", 2), ("validation", 1)):
        names = [f"{split}-{part}.tar" for part in range(count)]
        for part, name in enumerate(names):
            samples = [(f"{part}{i}", 16 * i + part, str(i % 2)) for i in range(8)]
            write_shard(root / name, samples)
        info["splits"][split] = {
            "name": split,
            "num_samples": 8 * count,
            "filenames": names,
            "shard_lengths": [8] * count,
        }
    (root / "_info.json").write_text(json.dumps(info))
    return {"dataset": "wds/stream", "dataset_root": str(root), "num_classes": 2}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_of_a_stream_does_not_depend_on_those_before(
    stream: dict, num_workers: int
) -> None:
    def epochs(*numbers: int) -> list[torch.Tensor]:
        images = open_dataset(DatasetSpec(**stream)).train
        images = with_transform(images, evaluation_transform(INPUT), 0, num_workers)
        options = {"num_workers": num_workers, "persistent_workers": True}
        loader = make_loader(images, 4, collate, **options)
        passes = []
        for number in numbers:
            images.epoch = number
            loader.generator.manual_seed(number)
            passes.append(torch.cat([batch["images"] for batch in loader]))
        return passes

    first, second = epochs(0, 1)
    assert len(first) == 16
    assert not torch.equal(first, second)
    assert torch.equal(epochs(1)[0], second)


def test_a_stream_trains(stream: dict, tiny_fields: Callable[..., dict]) -> None:
    result = train(resolve(tiny_fields(**stream, epochs=1)))
    assert result.metrics["history"][0]["update"] == 4
    assert len(result.evaluation.targets) == 8


def test_hugging_face_images(
    image_folder: Path,
    tiny_fields: Callable[..., dict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    spec = DatasetSpec(f"hfds/{image_folder}", dataset_root=str(tmp_path / "cache"))
    data = open_dataset(spec)
    assert (len(data.train), len(data.test), data.classes) == (16, 8, ("dark", "light"))
    assert data.train[15][1] == 1
    result = train(
        resolve(
            tiny_fields(
                dataset=spec.dataset, dataset_root=spec.dataset_root, epochs=1, num_workers=1
            )
        )
    )
    assert result.task.classes == ("dark", "light")
    (image_folder / "train" / "light" / "7.png").write_bytes(b"nothing")
    with pytest.raises(ImageError, match="15 of hfds/"):
        data.train[15]
