"""predict --whole: the mask of one picture, read and written in bands."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vision_ttt.cli.main import main
from vision_ttt.dense import build_segmenter
from vision_ttt.engine.checkpoint import ModelMetadata, save_weights
from vision_ttt.pretrained import weights_path
from vision_ttt.tasks import load_model
from vision_ttt.tasks.masked_images.model import build_masked_image_model
from vision_ttt.whole import Normalisation

CLASSES = ["ground", "red thing", "blue thing"]
PALETTE = [[128, 128, 128], [200, 0, 0], [0, 0, 250]]
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
SCALE = (33550, "d", 3, (0.5, 0.5, 0.0), True)
TIE = (33922, "d", 6, (0.0, 0.0, 0.0, 4e5, 5e6, 0.0), True)
PIXELS = np.random.default_rng(0).integers(0, 256, (301, 277, 3), dtype=np.uint8)

Said = pytest.CaptureFixture[str]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    torch.manual_seed(0)
    arguments = {"num_classes": 3, "depth": 1, "dense": {"maps": "tokens"}}
    model = build_segmenter("vittt_nano_patch4_32", **arguments)
    torch.nn.init.normal_(model.head.weight)
    shown = {"longer_side": 2048, "test_shorter_side": 512}
    shown |= {"evaluation": "whole", "window": 512, "stride": 341}
    metadata = ModelMetadata(
        task={"name": "segmentation", "maps": "tokens"},
        model="vittt_nano_patch4_32",
        model_args=arguments,
        carried={
            "classes": CLASSES,
            "palette": PALETTE,
            "input": {"mean": MEAN, "std": STD, **shown},
        },
    )
    path = tmp_path / "last.safetensors"
    save_weights(path, model.state_dict(), metadata)
    return str(path)


def _expected() -> np.ndarray:
    return _labels(Normalisation(MEAN, STD)(PIXELS))


def _labels(picture: torch.Tensor) -> np.ndarray:
    torch.manual_seed(0)
    model = build_segmenter(
        "vittt_nano_patch4_32", num_classes=3, depth=1, dense={"maps": "tokens"}
    )
    torch.nn.init.normal_(model.head.weight)
    with torch.no_grad():
        return model.eval()(picture[None])[0].argmax(0).numpy()


def _predict(*arguments: object) -> int:
    return main(["predict", *map(str, arguments)])


def test_the_mask_is_the_models_and_lies_where_the_picture_does(
    checkpoint: str, tmp_path: Path, capsys: Said
) -> None:
    picture, mask, preview = (tmp_path / name for name in ("p.tif", "mask.tif", "preview.png"))
    tifffile.imwrite(picture, PIXELS, tile=(64, 64), compression="zlib", extratags=[SCALE, TIE])
    given = (picture, "--checkpoint", checkpoint, "--whole", "--memory", "2GiB")
    assert _predict(*given, "--output", mask, "--preview", preview) == 0
    with tifffile.TiffFile(mask) as file:
        page = file.pages.first
        labels = page.asarray()
        assert (page.is_tiled, page.compression) == (True, 8)
        assert json.loads(page.description) == {"classes": CLASSES}
        assert page.tags[33550].value == SCALE[3]
        assert page.tags[33922].value == TIE[3]
        assert (page.colormap[:, :3] // 257).T.tolist() == PALETTE
    assert (labels == _expected()).mean() > 0.999
    with Image.open(preview) as shown:
        assert (np.asarray(shown) == labels).all()
    said = capsys.readouterr()
    assert "277 × 301 pixels, 3 classes" in said.out
    assert "76 × 70 tokens in bands of" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("last.safetensors", "mask.tif", "p.tif", "preview.png")
    ]


def test_a_geotiff_keeps_its_place_and_what_has_no_data(
    checkpoint: str, tmp_path: Path, capsys: Said
) -> None:
    rasterio = pytest.importorskip("rasterio")
    picture, mask = tmp_path / "p.tif", tmp_path / "mask.tif"
    pixels = PIXELS.transpose(2, 0, 1).copy()
    pixels[pixels == 0] = 1
    pixels[:, 200:210, :30] = 0
    stored = {"driver": "GTiff", "dtype": "uint8", "nodata": 0, "compress": "lzw"}
    place = {"crs": "EPSG:32633", "transform": rasterio.Affine(0.5, 0, 4e5, 0, -0.5, 5e6)}
    with rasterio.open(
        picture, "w", **{**stored, **place, "count": 3, "width": 277, "height": 301}
    ) as file:
        file.write(pixels)
    assert _predict(picture, "--checkpoint", checkpoint, "--whole", "--output", mask) == 0
    assert "by the reader raster: 76 × 70 tokens" in capsys.readouterr().err
    shown = Normalisation(MEAN, STD)(pixels.transpose(1, 2, 0), pixels.transpose(1, 2, 0) > 0)
    wanted = _labels(shown)
    wanted[200:210, :30] = 255
    with rasterio.open(mask) as file:
        assert (file.crs.to_epsg(), file.transform) == (32633, place["transform"])
        assert file.nodata == 255
        assert (file.read(1) == wanted).mean() > 0.999
        assert ((file.read(1) == 255) == (wanted == 255)).all()
    given = ("--checkpoint", checkpoint, "--whole", "--overwrite", "--output", mask)
    assert _predict(picture, *given, "--bands", "1", "2") == 2
    assert "has 2 channels, and mean and std are given for 3" in capsys.readouterr().err


@pytest.mark.parametrize("of", ["a segmenter", "a classifier", "a masked image model"])
def test_tokens_are_written_as_zarr(of: str, checkpoint: str, tmp_path: Path, capsys: Said) -> None:
    zarr = pytest.importorskip("zarr")
    if of != "a segmenter":
        checkpoint = "vittt_nano_patch4_32.digits"
    if of == "a masked image model":
        _, metadata = load_model(weights_path(checkpoint))
        metadata = dataclasses.replace(metadata, task={"name": "masked-images"})
        model = build_masked_image_model(metadata.model, metadata.model_args)
        checkpoint = str(tmp_path / "m.safetensors")
        save_weights(Path(checkpoint), model.state_dict(), metadata)
    np.save(tmp_path / "p.npy", PIXELS)
    given = (tmp_path / "p.npy", "--checkpoint", checkpoint, "--whole", "--largest", "200")
    features = tmp_path / "t.zarr"
    assert _predict(*given, "--features", features, "--feature-dtype", "float32") == 0
    model, metadata = load_model(weights_path(checkpoint), task=None)
    model = model.maps if of == "a segmenter" else model
    backbone = model if of == "a classifier" else model.backbone
    backbone.dynamic_img_size = True
    shown = metadata.carried["input"]
    picture = Normalisation(shown["mean"], shown["std"], 200)(PIXELS)
    picture = torch.nn.functional.pad(picture, (0, 3, 0, 3))
    with torch.no_grad():
        wanted = backbone.forward_features(picture[None]).view(76, 70, -1)
    array = zarr.open_array(features, mode="r")
    np.testing.assert_allclose(array[:], wanted.numpy(), atol=1e-3)
    assert dict(array.attrs) == {
        **{"picture": "p.npy", "model": "vittt_nano_patch4_32"},
        **{"patch": [4, 4], "pixels": [301, 277]},
    }
    assert not (tmp_path / ".t.zarr.scratch").exists()
    assert _predict(*given, "--features", features) == 2
    assert "already exist; name another folder, or give --overwrite" in capsys.readouterr().err
    assert _predict(*given, "--features", features, "--overwrite") == 0
    assert zarr.open_array(features, mode="r").dtype == np.float16


def test_a_slides_mask_has_its_level(checkpoint: str, tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    slide, mask = tmp_path / "s.tif", tmp_path / "m.tif"
    with tifffile.TiffWriter(slide) as file:
        for step in (1, 4):
            kind = {"subfiletype": int(step > 1), "resolution": (2e4, 2e4), "resolutionunit": 3}
            file.write(PIXELS[::step, ::step], tile=(64, 64), photometric="rgb", **kind)
    given = ("--checkpoint", checkpoint, "--whole", "--reader", "slide", "--mpp", "2.5")
    assert _predict(slide, *given, "--output", mask) == 0
    with tifffile.TiffFile(mask) as file:
        page = file.pages.first
        assert page.shape == PIXELS[::4, ::4].shape[:2]
        assert 1e4 / page.get_resolution("CENTIMETER")[0] == pytest.approx(2, rel=0.02)


def test_a_memory_map_is_a_picture(checkpoint: str, tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", PIXELS)
    given = (tmp_path / "p.npy", "--checkpoint", checkpoint, "--whole", "--storage", "bfloat16")
    assert _predict(*given, "--output", tmp_path / "mask.tif") == 0
    assert (tifffile.imread(tmp_path / "mask.tif") == _expected()).mean() > 0.95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--whole",), "name one of them: --output mask.tif, or --features tokens.zarr"),
        (("--whole", "--output", "mask.png"), "must be a .tif or .tiff file"),
        (("--whole", "--output", "m.tif", "--topk", "2"), "--topk does not go with --whole"),
        (("--whole", "--output", "m.tif", "--skip-bad"), "--skip-bad does not go with --whole"),
        (("--whole", "--output", "m.tif", "--num-workers", "2"), "--num-workers does not go"),
        (("--whole", "--output", "m.tif", "--device", "cuda"), "--whole runs on the cpu"),
        (("--whole", "--output", "m.tif", "--memory", "much"), "memory is 'much'; accepted"),
        (("--whole", "--output", "m.tif", "--memory", "9MiB"), "needs at least"),
        (("--memory", "2GiB"), "--memory is for whole pictures; give --whole, too"),
        (("--storage", "bfloat16"), "--storage is for whole pictures; give --whole, too"),
        (("--mpp", "2"), "--mpp is for whole pictures; give --whole, too"),
        (("--whole", "--output", "m.tif", "--mpp", "2"), "mpp is not for"),
        (("--whole", "--output", "m.tif", "--features", "t.zarr"), "name one of them"),
        (("--whole", "--features", "t.npy"), "the features t.npy must be a .zarr folder"),
        (
            ("--whole", "--features", "t.zarr", "--preview", "p.png"),
            "is not accepted with --features",
        ),
        (
            ("--whole", "--output", "m.tif", "--feature-dtype", "float16"),
            "--feature-dtype is float16; it is for --features",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[str, ...], message: str, checkpoint: str, tmp_path: Path, capsys: Said
) -> None:
    picture = tmp_path / "p.tif"
    tifffile.imwrite(picture, PIXELS)
    assert _predict(picture, "--checkpoint", checkpoint, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m.tif").exists()


def test_the_picture_is_never_written(checkpoint: str, tmp_path: Path, capsys: Said) -> None:
    for name, arguments in (
        ("p.tif", ("--output", tmp_path / "p.tif")),
        ("p.png", ("--output", tmp_path / "m.tif", "--preview", tmp_path / "p.png")),
    ):
        tifffile.imwrite(tmp_path / name, PIXELS)
        content = (tmp_path / name).read_bytes()
        given = (tmp_path / name, "--checkpoint", checkpoint, "--whole", "--reader", "tiff")
        assert _predict(*given, "--overwrite", *arguments) == 2
        assert "the output is the picture itself" in capsys.readouterr().err
        assert (tmp_path / name).read_bytes() == content


def test_other_checkpoints_and_pictures_are_refused(
    checkpoint: str, tmp_path: Path, capsys: Said
) -> None:
    picture, output = tmp_path / "p.tif", tmp_path / "m.tif"
    for content, message in (
        (b"II*\0", "p.tif cannot be read as TIFF"),
        (b"", "p.tif cannot be read as TIFF"),
        (b"no picture", "p.tif cannot be read as TIFF"),
    ):
        picture.write_bytes(content)
        given = (picture, "--checkpoint", checkpoint, "--whole", "--output", output)
        assert _predict(*given) == 2
        assert message in capsys.readouterr().err
    other = tmp_path / "p.gif"
    other.write_bytes(b"GIF")
    assert _predict(other, *given[1:]) == 2
    assert "no reader is for" in capsys.readouterr().err
    tifffile.imwrite(picture, PIXELS)
    assert _predict(picture, "--checkpoint", "vittt_nano_patch4_32.digits", *given[3:]) == 2
    assert "not a" in capsys.readouterr().err


def test_a_segmenter_on_a_backbone_with_attention_is_refused(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("zarr")
    arguments = {"num_classes": 3, "depth": 1, "dense": {"maps": "tokens"}, "img_size": 32}
    model = build_segmenter("deit_tiny_patch16_224", **arguments)
    shown = {"mean": MEAN, "std": STD, "longer_side": 2048, "test_shorter_side": 512}
    shown |= {"evaluation": "whole", "window": 512, "stride": 341}
    metadata = ModelMetadata(
        task={"name": "segmentation", "maps": "tokens"},
        model="deit_tiny_patch16_224",
        model_args=arguments,
        carried={"classes": CLASSES, "palette": PALETTE, "input": shown},
    )
    save_weights(tmp_path / "d.safetensors", model.state_dict(), metadata)
    np.save(tmp_path / "p.npy", PIXELS)
    given = (tmp_path / "p.npy", "--checkpoint", tmp_path / "d.safetensors", "--whole")
    for output in (("--output", tmp_path / "m.tif"), ("--features", tmp_path / "t.zarr")):
        assert _predict(*given, *output) == 2
        assert "holds a VisionTransformer; --whole is for" in capsys.readouterr().err
