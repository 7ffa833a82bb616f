"""`vision-ttt explain`: what it writes is what the API finds, and what cannot be is one line."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from described_models import describe_classifier
from tolerances import assert_close
from vision_ttt import explain
from vision_ttt.cli.explained.inner_loop import training_unit
from vision_ttt.cli.main import main
from vision_ttt.data import evaluation_transform
from vision_ttt.data.sample_images import sample_images
from vision_ttt.engine.building import build_model
from vision_ttt.engine.checkpoint import ModelMetadata, read_weights, save_weights
from vision_ttt.tasks import load_model
from vision_ttt.tasks.images.models import data_config

Said = pytest.CaptureFixture[str]
SMALL = {"num_classes": 3, "depth": 2, "embed_dim": 32, "num_heads": 1, "img_size": 32}
DIGITS = "sample:digit-0-2"


def written(folder: Path, name: str, **arguments: int) -> str:
    """A checkpoint of a small model, of other weights than --random draws."""
    torch.manual_seed(1)
    model = build_model(name, {**SMALL, **arguments})
    metadata = describe_classifier(name, {**SMALL, **arguments}, "abc", data_config(model, 32))
    folder.mkdir()
    save_weights(folder / "last.safetensors", model.state_dict(), metadata)
    return str(folder / "last.safetensors")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("models") / "small", "vittt_nano_patch4_32")


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "deit"
    return written(folder, "deit_tiny_patch16_224", patch_size=8)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Name → figure of what would be written; drawing takes the most time."""
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(
        "vision_ttt.cli.explain.save_figure",
        lambda figure, folder, name: figures.__setitem__(name, figure),
    )
    return figures


def shown(checkpoint: str, names: str = "digit-0-2") -> tuple[nn.Module, Tensor]:
    """A checkpoint's model, and sample images as predict prepares them."""
    model, metadata = load_model(checkpoint)
    transform = evaluation_transform(metadata.carried["input"])
    return model, torch.stack([transform(sample.open()) for sample in sample_images(names)])


def arrays(folder: Path, what: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{what}.npz") as read:
        return dict(read)


def test_gradient_maps_of_a_checkpoint_before_and_after_training(
    checkpoint: str, tmp_path: Path, capsys: Said
) -> None:
    folder = tmp_path / "new" / "figures"
    command = ["explain", "gradient-map", checkpoint, "sample:digit-3", "--output", str(folder)]
    command += ["--random", "--last-layers", "2", "--fraction", "0.25"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"{folder}/gradient-map: pdf, svg, png" in said
    assert "gradient-map.npz: all arrays (models: 2, images: 1)" in said
    forms = {path.suffix for path in folder.iterdir()}
    assert forms == {".pdf", ".svg", ".png", ".npz"}
    assert len(list(folder.iterdir())) == 4

    model, images = shown(checkpoint, "digit-3")
    magnitude = explain.gradient_magnitude(model, images)
    found = arrays(folder, "gradient-map")
    assert_close(torch.from_numpy(found["small/digit-3/magnitude"]), magnitude[0], 1e-6)
    own = explain.mean_map(magnitude, 2)
    assert_close(torch.from_numpy(found["small/digit-3/map"]), own[0], 1e-6)
    top = torch.from_numpy(found["small/digit-3/top"])
    assert torch.equal(top, explain.top_fraction(own, 0.25)[0])
    before = found["small untrained/digit-3/map"]
    assert before.shape == found["small/digit-3/map"].shape
    assert not np.allclose(before, found["small/digit-3/map"])

    assert main(command) == 2
    told = capsys.readouterr().err
    assert "already exists; name another folder, or give --overwrite" in told
    assert len(told.splitlines()) == 1


def test_sheets_show_layers_and_heads(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vision_ttt.cli.explained.maps.PAGE", 1)
    before = Path(checkpoint).read_bytes()
    command = ["explain", "gradient-map", checkpoint, DIGITS, "--sheets", "--limit", "2"]
    assert main([*command, "--state", "current", "--output", str(tmp_path)]) == 0
    sheets = {f"gradient-map-layers-digit-{n}" for n in range(2)}
    sheets |= {f"gradient-map-heads-small-digit-{n}" for n in range(2)}
    assert set(drawn) == {"gradient-map", "gradient-map-2", *sheets}
    model, images = shown(checkpoint, "digit-1")
    magnitude = explain.gradient_magnitude(model, images, state="current")[0]
    axes = drawn["gradient-map-heads-small-digit-1"].axes
    assert [axis.get_title() for axis in axes[:2]] == ["→ head 1", "← head 1"]
    last = torch.from_numpy(axes[3].images[1].get_array().data)
    assert_close(last, magnitude[1, 1], 1e-5)
    assert Path(checkpoint).read_bytes() == before


def test_means_weigh_every_image_alike(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    model, images = shown(checkpoint)
    batches = ["--batch-size", "2", "--output", str(tmp_path)]
    for what in ("inner-loss", "receptive-field", "fast-weights"):
        assert main(["explain", what, checkpoint, DIGITS, *batches]) == 0
    field = arrays(tmp_path, "receptive-field")
    expected = explain.receptive_field(model, images)
    assert_close(torch.from_numpy(field["small/field"]), expected, 1e-5)
    assert field["small/anisotropy"] == pytest.approx(explain.anisotropy(expected), rel=1e-4)
    inner_loss = arrays(tmp_path, "inner-loss")
    assert (inner_loss["small/epoch"], inner_loss["small/update"]) == (0, 0)
    for what, found in (
        ("inner-loss", explain.inner_loss_course(model, images)),
        ("fast-weights", explain.fast_weights(model, images)),
    ):
        own = arrays(tmp_path, what)
        for layer, values in found.items():
            for name, expected in values._asdict().items():
                read = torch.from_numpy(own.pop(f"small/{layer}/{name}"))
                assert_close(read, expected.cpu(), 1e-4)
        assert set(own) <= {"small/epoch", "small/update"}
    assert set(drawn) == {
        *("inner-loss-small", "receptive-field", "receptive-field-profile", "fast-weights")
    }


def test_norms_of_models_beside_each_other(
    checkpoint: str, deit: str, tmp_path: Path, drawn: dict[str, Figure], capsys: Said
) -> None:
    command = ["explain", "norms", checkpoint, deit, "sample:digit-1", "--names", "ours", "theirs"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    found = arrays(tmp_path, "norms")
    for name, path in (("ours", checkpoint), ("theirs", deit)):
        own = torch.from_numpy(found[f"{name}/digit-1/norms"])
        assert_close(own, explain.token_norms(*shown(path, "digit-1"))[0], 1e-5)
    assert set(drawn) == {"norms", "norms-ours", "norms-theirs"}
    assert "of the last layer's tokens are outliers" in capsys.readouterr().out


def test_every_sheet_has_a_file_of_its_own(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vision_ttt.cli.explained.maps.PAGE", 2)
    command = ["explain", "norms", checkpoint, checkpoint, DIGITS]
    assert main([*command, "--output", str(tmp_path / "pages")]) == 0
    sheets = {"norms-small", "norms-small-page-2", "norms-small-2", "norms-small-2-page-2"}
    assert set(drawn) == {"norms", *sheets}
    drawn.clear()
    assert (
        main([*command[:-1], "sample:digit-1", "--names", "A", "A+", "--output", str(tmp_path)])
        == 0
    )
    assert set(drawn) == {"norms", "norms-A", "norms-A-2"}


@pytest.mark.parametrize(
    ("what", "value", "told"),
    [
        ("norms", 0.0, "with a median above 0 in every image and layer; the model's weights may"),
        ("fast-weights", float("nan"), "input matrix contained non-finite values"),
    ],
)
def test_a_damaged_model_is_one_line(
    checkpoint: str, tmp_path: Path, what: str, value: float, told: str, capsys: Said
) -> None:
    weights, metadata = read_weights(Path(checkpoint))
    damaged = {name: torch.full_like(x, value) for name, x in weights.items()}
    path = tmp_path / "damaged.safetensors"
    save_weights(path, damaged, metadata)
    assert main(["explain", what, str(path), DIGITS, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_several_models_lose_in_one_figure(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    command = ["explain", "inner-loss", checkpoint, checkpoint, "sample:digit-1", "--window", "4"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    assert set(drawn) == {"inner-loss-small", "inner-loss-small-2", "inner-loss"}


def of_epochs(tmp_path: Path, checkpoint: str, trained: list[tuple[int, int]]) -> list[str]:
    """Copies of a checkpoint that say so many epochs and updates of themselves."""
    weights, metadata = read_weights(Path(checkpoint))
    paths = [tmp_path / f"update-{update}.safetensors" for _, update in trained]
    for path, (epoch, update) in zip(paths, trained, strict=True):
        changed = {name: x * (1 + update / 10) for name, x in weights.items()}
        save_weights(path, changed, dataclasses.replace(metadata, epoch=epoch, update=update))
    return [str(path) for path in paths]


def test_checkpoints_of_a_model_in_their_order_show_its_training(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    given = of_epochs(tmp_path, checkpoint, [(1, 4), (2, 8)])
    command = ["explain", "inner-loss", *given, "sample:digit-1", "--random", "--window", "1"]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    names = ["update-4 untrained", "update-4", "update-8"]  # untrained the two are the same
    assert set(drawn) == {
        *("inner-loss", "inner-loss-training"),
        *(f"inner-loss-{name.replace(' ', '-')}" for name in names),
    }
    found = arrays(tmp_path / "out", "inner-loss")
    assert [(found[f"{n}/epoch"], found[f"{n}/update"]) for n in names] == [(0, 0), (1, 4), (2, 8)]
    axis = drawn["inner-loss-training"].axes[1]
    assert axis.get_xlabel() == "epoch"
    before = axis.lines[1]
    assert before.get_xdata().tolist() == [0, 1, 2]
    wanted = [found[f"{name}/blocks.1.mixer.ttt/before"].mean() for name in names]
    assert before.get_ydata() == pytest.approx(wanted, rel=1e-6)


def test_what_a_training_is_counted_in(checkpoint: str) -> None:
    _, metadata = read_weights(Path(checkpoint))

    def at(epoch: int, update: int) -> ModelMetadata:
        return dataclasses.replace(metadata, epoch=epoch, update=update)

    assert training_unit([at(0, 0), at(1, 4), at(3, 12)]) == "epoch"
    assert training_unit([at(0, 0), at(0, 2), at(1, 4)]) == "update"
    assert training_unit([at(0, 0), at(1, 4)]) is None
    assert training_unit([at(3, 12), at(3, 12), at(3, 12)]) is None  # several seeds
    assert training_unit([at(0, 0), at(1, 4), None]) is None
    other = dataclasses.replace(at(2, 8), model_args={**metadata.model_args, "depth": 1})
    assert training_unit([at(0, 0), at(1, 4), other]) is None


def test_a_named_model_has_constructor_arguments(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    named = "vittt_nano_patch4_32:depth=2,design=dual,img_size=16"
    command = ["explain", "norms", named, "sample:digit-1", "--names", "small"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    assert arrays(tmp_path, "norms")["small/digit-1/norms"].shape == (2, 4, 4)


def test_a_picture_s_name_may_be_no_text(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    picture = tmp_path / os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (16, 16)).save(picture)
    named = "vittt_nano_patch4_32:depth=1,img_size=16"
    command = ["explain", "norms", named, str(picture), "--names", "small"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    assert set(arrays(tmp_path, "norms")) == {"small/caf\ufffd/norms"}


def test_pictures_that_the_model_pads_are_drawn_padded(
    tmp_path: Path, drawn: dict[str, Figure]
) -> None:
    padded = "img_size=36,patch_size=16,dynamic_img_size=true,dynamic_img_pad=true"
    command = ["explain", "gradient-map", f"vittt_nano_patch4_32:depth=1,{padded}"]
    command += ["sample:digit-1", "--names", "small", "--sheets", "--output", str(tmp_path)]
    assert main(command) == 0
    assert arrays(tmp_path, "gradient-map")["small/digit-1/map"].shape == (3, 3)
    assert len(drawn) == 3
    for figure in drawn.values():
        heat = [axis.images[1] for axis in figure.axes if len(axis.images) == 2]
        assert {tuple(each.get_extent()) for each in heat} == {(0, 48, 48, 0)}


def test_whole_pictures_of_any_proportions(
    checkpoint: str, tmp_path: Path, drawn: dict[str, Figure], capsys: Said
) -> None:
    tall = tmp_path / "a.b" / "tall.png"
    tall.parent.mkdir()
    Image.effect_noise((50, 99), 60).convert("RGB").save(tall)
    given = [checkpoint, "sample:china", str(tall.parent), "--shorter-side", "33"]
    output = ["--output", str(tmp_path / "out")]
    assert main(["explain", "gradient-map", *given, *output]) == 0
    found = arrays(tmp_path / "out", "gradient-map")
    assert found["small/china/map"].shape == (8, 12)  # 640 × 427: 49 × 33 pixels
    assert found["small/tall/map"].shape == (16, 8)
    assert main(["explain", "inner-loss", *given, *output]) == 2
    told = capsys.readouterr().err
    assert "needs images of one size; small is shown images of 32 × 48 and 64 × 32" in told


@pytest.mark.parametrize(
    ("what", "given", "told"),
    [
        ("gradient-map", ["DEIT", DIGITS], "deit: gradient magnitude maps need a model with TTT"),
        ("inner-loss", ["DEIT", DIGITS], "deit: a VisionTransformer has no TTT layers"),
        ("fast-weights", ["DEIT", DIGITS], "deit: a VisionTransformer has no TTT layers"),
        ("norms", ["OURS", "BROKEN"], "cannot decode image"),
        ("norms", ["OURS", "missing.png"], "No such file: missing.png"),
        ("norms", ["OURS", "sample:chian"], "no sample picture is called 'chian'"),
        ("norms", ["OURS"], "no image is given"),
        ("norms", [DIGITS], "no model is given"),
        (
            "norms",
            ["vitt_nano", DIGITS],
            "unknown model 'vitt_nano'; nearest: ",
        ),
        ("norms", ["test_vit:depth", DIGITS], "has 'depth'; a model with constructor arguments is"),
        ("norms", ["test_vit:depth=[", DIGITS], "'[' is no YAML value"),
        ("norms", ["vittt_nano_patch4_32:dpeth=2", DIGITS], "cannot be built with {'dpeth': 2}"),
        ("norms", ["absent.safetensors", DIGITS], "No such file: absent.safetensors"),
        ("norms", ["OURS", DIGITS, "--names", "a", "b"], "--names has 2 names, and 1 models"),
        ("norms", ["OURS", DIGITS, "--names", "a/b"], "--names has 'a/b'"),
        ("norms", ["vittt_nano_patch4_32", DIGITS, "--random"], "--random is for checkpoints"),
        ("norms", ["OURS"] * 9 + [DIGITS], "9 models are given; a figure shows at most 8"),
        ("norms", ["OURS"] * 8 + [DIGITS, "--random"], "which makes more than 8 models"),
        ("norms", ["OURS"] * 7 + ["test_vit", DIGITS, "--random"], "more than 8 models"),
        ("norms", ["OURS", DIGITS, "--shorter-side", "0"], "--shorter-side is 0"),
        ("gradient-map", ["OURS", DIGITS, "--fraction", "1.5"], "--fraction is 1.5"),
        ("gradient-map", ["OURS", DIGITS, "--last-layers", "3"], "--last-layers is 3; small has 2"),
        ("gradient-map", ["OURS", DIGITS, "--state", "last"], "one of final, initial, current"),
        ("norms", ["OURS", DIGITS, "--window", "3"], "unknown flag --window"),
        ("heat", ["OURS", DIGITS], "gradient-map"),
    ],
)
def test_what_cannot_be_explained_is_one_line(
    checkpoint: str,
    deit: str,
    tmp_path: Path,
    what: str,
    given: list[str],
    told: str,
    capsys: Said,
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG")
    places = {"OURS": checkpoint, "DEIT": deit, "BROKEN": str(broken)}
    given = [places.get(word, word) for word in given]
    assert main(["explain", what, *given, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
