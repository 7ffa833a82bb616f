"""Diffusion on latents: an autoencoder's, encoded once; and the Fréchet distance of samples."""

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt.cli import sample
from vision_ttt.cli.main import main
from vision_ttt.data import DatasetError, DatasetSpec, ImageError, open_dataset
from vision_ttt.engine import ConfigError, train
from vision_ttt.engine.checkpoint import ModelMetadata, read_weights, save_weights
from vision_ttt.errors import UserError
from vision_ttt.recipes import resolve
from vision_ttt.tasks import load_model
from vision_ttt.tasks.diffusion.frechet import measure_frechet
from vision_ttt.tasks.diffusion.latents import (
    Autoencoder,
    LatentImages,
    cache_latents,
    latent_items,
)

SMALL = {"hidden_size": 32, "depth": 1, "num_heads": 2, "patch_size": 2}
LATENT = {
    **{"task": "diffusion", "model": "dit3_nano_patch4_32", "image_size": 16, "epochs": 1},
    **{"crop_scale": 1.0, "crop_ratio": 1.0, "drop_path": None, "arguments": SMALL},
}


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random autoencoder: 4 channels, cells of 2 × 2 pixels."""
    torch.manual_seed(0)
    model = AutoencoderKL(
        latent_channels=4,
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=2,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    folder = tmp_path_factory.mktemp("autoencoder")
    model.save_pretrained(folder)
    return str(folder)


class Pictures(torch.utils.data.Dataset):
    """Five random pictures of two classes; the one numbered ``bad`` does not decode."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if index == self.bad:
            raise ImageError(f"{index}.png", "it is no image")
        return Image.fromarray(self.images[index]), index % 2


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def cached(folder: Path, name: str, **options: object) -> LatentImages:
    given = {"mirrored": True, "batch_size": 2, "bad": -1, **options}
    images = Pictures(given.pop("bad"))
    return cache_latents(folder, "train", images, to_tensor, Autoencoder(name), {"of": 1}, **given)


def test_latents_are_encoded_once(autoencoder: str, tmp_path: Path) -> None:
    images = cached(tmp_path, autoencoder)
    own = Autoencoder(autoencoder)
    x = torch.stack([to_tensor(Pictures()[index][0]) for index in range(5)])
    posterior = own.model.encode(x.flip(-1)).latent_dist
    found = torch.stack([images[index][0] for index in range(5)])
    assert found.shape == (5, 2, 2, 4, 4, 4)
    assert_close(found[:, 1, 0], (posterior.mean - 0.25) * 0.5, 1e-3)
    assert_close(found[:, 1, 1], posterior.std * 0.5, 1e-3)
    assert [images[index][1] for index in range(5)] == [0, 1, 0, 1, 0]
    assert_close(own.decode(found[:, 0, 0], 2), own.model.decode(posterior.mean.flip(-1)).sample, 2)
    before = images.file.stat().st_mtime_ns
    assert len(cached(tmp_path, autoencoder)) == 5
    assert images.file.stat().st_mtime_ns == before
    with pytest.raises(DatasetError, match="is requested; name another folder"):
        cached(tmp_path, autoencoder, mirrored=False)
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(DatasetError, match=r"train.json is damaged .*; remove it"):
        cached(tmp_path, autoencoder)


@pytest.mark.parametrize(
    ("name", "content"), [("train.npy", b"x" * 300), ("train.npy", b""), ("train-targets.npy", b"")]
)
def test_damaged_latents_are_named(
    autoencoder: str, tmp_path: Path, name: str, content: bytes
) -> None:
    cached(tmp_path, autoencoder)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=r"latents of .*train\.json are damaged"):
        cached(tmp_path, autoencoder)


def test_latents_of_another_division_are_refused(
    tiny_fields, image_folder: Path, autoencoder: str, tmp_path: Path
) -> None:
    fields = {**LATENT, "autoencoder": autoencoder, "latents": str(tmp_path / "latents")}
    config = resolve(tiny_fields(**fields, dataset=str(image_folder / "train")))
    task = config.task.open(config)
    model = task.build_model(config.model.name, task.model_arguments())
    task.prepare(model)
    first = image_folder / "train" / "dark" / "0.png"
    first.rename(first.with_name("renamed.png"))
    with pytest.raises(DatasetError, match=r"held_out.* is requested; name another folder"):
        config.task.open(config).prepare(model)


def test_a_spawned_process_opens_the_latents_anew(autoencoder: str, tmp_path: Path) -> None:
    images = cached(tmp_path, autoencoder)
    pickled = pickle.dumps(images)
    assert len(pickled) < images.moments.nbytes
    again = pickle.loads(pickled)
    assert isinstance(again.moments, np.memmap)
    assert torch.equal(again[3][0], images[3][0])


def test_an_interrupted_encoding_is_none(autoencoder: str, tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"4\.png"):
        cached(tmp_path, autoencoder, bad=4)
    assert not (tmp_path / "train.json").exists()
    assert len(cached(tmp_path, autoencoder)) == 5


def test_items_are_drawn_from_the_latents_distribution(autoencoder: str, tmp_path: Path) -> None:
    images = cached(tmp_path, autoencoder)
    means, deviations = images[3][0].unbind(1)
    drawn = latent_items(images, 0, flip=0.5)
    many = []
    for drawn.epoch in range(300):
        latent, target, index = drawn[3]
        assert (target, index) == (1, 3)
        many.append(latent)
    many = torch.stack(many)
    assert_close(many.mean(0), means.mean(0), 0.3)
    wanted = (deviations.square().mean(0) + means.var(0, unbiased=False)).sqrt()
    assert_close(many.std(0), wanted, 0.3)
    assert torch.equal(drawn[3][0], many[-1])
    fixed = latent_items(images, 0, flip=None)
    assert torch.equal(fixed[3][0], means[0])


def test_latents_are_mirrored_as_often_as_images_are_flipped() -> None:
    moments = torch.zeros(2, 2, 1, 1, 1)
    moments[1, 0] = 1  # the mirrored image's mean

    def share(flip: float) -> float:
        items = latent_items([(moments, 0)], 0, flip=flip)
        return sum(items[number][0].item() for number in range(1000)) / 1000

    assert [share(0.0), share(1.0)] == [0, 1]
    assert share(0.1) == pytest.approx(0.1, abs=0.03)


def test_an_autoencoder_in_the_home_folder(
    autoencoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(autoencoder)
    monkeypatch.setenv("HOME", str(path.parent))
    assert Autoencoder(f"~/{path.name}").channels == 4


def test_an_autoencoder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Autoencoder(str(tmp_path))


def test_training_and_sampling(
    tiny_fields,
    autoencoder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    latents = tmp_path / "latents"
    fields = {"autoencoder": autoencoder, "latents": "~/latents", "horizontal_flip": 0.5}
    result = train(resolve(tiny_fields(**LATENT, **fields)))
    assert result.model.in_channels == 4
    assert result.model.input_size == (8, 8)
    assert json.loads((latents / "train.json").read_text())["mirrored"] is True
    assert json.loads((latents / "test.json").read_text())["mirrored"] is False
    assert result.task.pixels(torch.randn(2, 4, 8, 8)).shape == (2, 3, 16, 16)
    path = result.run_dir / "last.safetensors"
    assert load_model(path, task="diffusion")[1].task["autoencoder"] == autoencoder
    images, output = tmp_path / "made", tmp_path / "samples.safetensors"
    command = ["sample", "--checkpoint", str(path), "--steps", "2", "--per-class", "2"]
    original, decoded = Autoencoder.decode, []

    def decode(self: Autoencoder, latents: torch.Tensor) -> torch.Tensor:
        decoded.append(len(latents))
        return original(self, latents)

    with monkeypatch.context() as patch:
        patch.setattr(Autoencoder, "decode", decode)
        patch.setattr(sample, "_DECODED_AT_ONCE", 3)
        assert main([*command, "--images", str(images), "--output", str(output)]) == 0
    assert decoded == [3, 1]  # fifty thousand images at once would not fit in memory
    samples = load_file(output)["samples"]
    assert samples.shape == (4, 4, 8, 8)
    capsys.readouterr()
    made = sorted(images.rglob("*.png"), key=lambda file: file.name)
    shown = np.stack([np.array(Image.open(file)) for file in made])
    wanted = result.task.pixels(samples).permute(0, 2, 3, 1).numpy()
    assert abs(shown.astype(int) - wanted).max() <= 1
    for more in ([], ["--split", "train"], ["--dataset", str(images), "--split", "all"]):
        assert main(["eval", str(path), "--json", *more]) == 0
        evaluated = json.loads(capsys.readouterr().out)
        if not more:
            assert evaluated["loss"] == pytest.approx(result.metrics["test_loss"], rel=1e-3)


def test_frechet_distance(tiny_fields, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the digits themselves it is zero; of noise it is not."""
    data, noise = tmp_path / "digits", tmp_path / "noise"
    scans = open_dataset(DatasetSpec("digits")).test
    for index in range(24):
        image, digit = scans[index]
        file = data / ("train", "val")[index % 2] / str(digit % 2) / f"{index}.png"
        levels = np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        for path, picture in ((file, image), (noise / file.name, Image.fromarray(levels))):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    fields = {"task": "diffusion", "model": "dit3_nano_patch4_32", "epochs": None, "updates": 1}
    fields |= {"dataset": str(data), "arguments": {**SMALL, "patch_size": 8}, "drop_path": None}
    result = train(resolve(tiny_fields(**fields, crop_fraction=1.0, warmup=0)))
    command = ["eval", str(result.run_dir / "last.safetensors"), "--json", "--fid"]
    features = ["--fid-features", "vittt_nano_patch4_32.digits"]
    digits, distances = data / "val", {}
    for folder in (digits, noise):
        capsys.readouterr()
        assert main([*command, str(folder), *features]) == 0
        distances[folder.name] = json.loads(capsys.readouterr().out)
    assert distances["val"]["made"] == distances["val"]["real"] == 12
    assert distances["val"]["frechet_distance"] == pytest.approx(0, abs=1e-4)
    assert distances["noise"]["frechet_distance"] > 1
    Image.new("RGB", (9, 9)).save(digits / "other.png")
    for given, told in (
        ([str(digits), *features], "images of several sizes"),
        ([str(tmp_path / "nowhere")], "is no folder of images"),
        ([str(noise), "--skip-bad"], "--skip-bad does not go with --fid"),
        ([str(noise), "--dtype", "bfloat16"], "--fid compares features in float32"),
    ):
        assert main([*command, *given]) == 2
        assert told in capsys.readouterr().err
    weights, metadata = read_weights(result.run_dir / "last.safetensors")
    converted = tmp_path / "converted.safetensors"
    save_weights(converted, weights, dataclasses.replace(metadata, data={}))
    assert main(["eval", str(converted), "--fid", str(noise), *features]) == 2
    assert "does not name its dataset" in capsys.readouterr().err
    assert main(["eval", "vittt_nano_patch4_32.digits", "--fid", str(noise)]) == 2
    assert "--fid requires a diffusion model; the checkpoint's task is" in capsys.readouterr().err


def test_no_frechet_distance_to_images_of_an_unknown_size(tmp_path: Path) -> None:
    carried = {"input": {"input_size": [4, 32, 32]}}  # as of a converted checkpoint
    metadata = ModelMetadata({"name": "diffusion"}, "dit3_small_patch2_32", {}, carried)
    options = {"features": None, "changes": {"dataset": "digits"}, "part": "test", "batch_size": 8}
    with pytest.raises(UserError, match="latents of 4 channels and does not record the size"):
        measure_frechet(metadata, tmp_path, **options)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"latents": None}, "give both or neither"),
        ({"image_size": None}, "image_size is null"),
        ({"crop_scale": 0.5}, "crop_scale is 0.5; latents are of centre crops"),
    ],
)
def test_fields_that_would_be_ignored(changes: dict, told: str) -> None:
    fields = {"task": "diffusion", "model": "dit3_small_patch2_32", "image_size": 256}
    fields |= {"autoencoder": "a", "latents": "b", "crop_scale": 1.0, "crop_ratio": 1.0}
    with pytest.raises(ConfigError, match=told):
        resolve({**fields, **changes})
