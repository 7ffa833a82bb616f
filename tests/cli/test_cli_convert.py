"""`vision-ttt convert`."""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt.cli.convert import convertible_models
from vision_ttt.cli.main import main
from vision_ttt.models import create_model
from vision_ttt.tasks import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
ARGUMENTS = {
    "vit3_tiny_patch16_224": {"embed_dim": 96, "depth": 2, "num_heads": 3},
    "hvit3_tiny": {"dims": [32, 64, 64, 96], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 3]},
    "vim_tiny_patch16_224": {"embed_dim": 64, "depth": 2},
    "mambar_small_patch16_224": {"embed_dim": 96, "depth": 2},
}
DIFFUSION = "dit3_small_patch2_32"
GOLDENS = {
    "vit3_tiny_patch16_224": "vit3_model",
    "hvit3_tiny": "h_vit3_model",
    "vim_tiny_patch16_224": "vim_model",
    "mambar_small_patch16_224": "mambar_model_cls3_reduce3",
}


def flags(model):
    arguments = ARGUMENTS[model]
    return ["--model", model, *(f"--arguments.{key}={value}" for key, value in arguments.items())]


@pytest.fixture
def released(tmp_path):
    """Writes a golden's weights as its authors would, and returns the path."""

    def write(name):
        tensors = load_file(GOLDEN / f"{name}.safetensors")
        path = tmp_path / f"{name}.pth"
        weights = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
        torch.save({"model": weights}, path)
        return str(path)

    return write


@pytest.mark.parametrize("model", GOLDENS)
def test_makes_a_checkpoint_that_computes_what_the_release_did(model, released, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    assert main(["convert", released(GOLDENS[model]), str(out), *flags(model)]) == 0
    said = capsys.readouterr().out
    parameters = json.loads((GOLDEN / f"{GOLDENS[model]}.json").read_text())
    assert f"{parameters['validation']['checks_float32']['n_params']:,} parameters" in said
    tensors = load_file(GOLDEN / f"{GOLDENS[model]}.safetensors")
    loaded, metadata = load_model(out)
    assert metadata.model == model
    assert metadata.carried["classes"] == list("0123456789")
    own_size = metadata.model_args.get("img_size", 224)  # models with positions know it
    assert list(metadata.carried["input"]["input_size"]) == [3, own_size, own_size]
    with torch.no_grad():
        assert_close(loaded(tensors["input.image"]), tensors["output.logits"], 2e-5)
    by_timm = timm.create_model(
        model,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(out), "num_classes": 10},
        **metadata.model_args,
    ).eval()
    with torch.no_grad():
        assert_close(by_timm(tensors["input.image"]), tensors["output.logits"], 2e-5)


def test_images_need_not_be_squares(released, tmp_path):
    """16 patches of 16 × 16 pixels, as in the release."""
    out, model = tmp_path / "out.safetensors", "vim_tiny_patch16_224"
    size = "--arguments.img_size=[32, 128]"
    assert main(["convert", released(GOLDENS[model]), str(out), *flags(model), size]) == 0
    loaded, metadata = load_model(out)
    assert list(metadata.carried["input"]["input_size"]) == [3, 32, 128]
    assert loaded(torch.zeros(1, 3, 32, 128)).shape == (1, 10)


def test_an_imagenet_checkpoint_has_imagenets_classes(tmp_path):
    model = timm.create_model("vit3_tiny_patch16_224", depth=1, embed_dim=32, num_heads=2)
    weights = {key.replace(".ttt.", ".attn."): x for key, x in model.state_dict().items()}
    torch.save(weights, tmp_path / "a.pth")
    out = tmp_path / "out.safetensors"
    arguments = ["--arguments.depth=1", "--arguments.embed_dim=32", "--arguments.num_heads=2"]
    argv = ["convert", str(tmp_path / "a.pth"), str(out), "--model", "vit3_tiny_patch16_224"]
    assert main([*argv, *arguments]) == 0
    _, metadata = load_model(out)
    assert len(metadata.carried["classes"]) == 1000
    assert metadata.carried["classes"][0] == "n01440764"


def test_a_diffusion_model_tells_its_shapes_itself(released, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    sizes = {"hidden_size": 96, "depth": 2, "num_heads": 3}
    flags = [f"--arguments.{key}={value}" for key, value in sizes.items()]
    assert main(["convert", released("dit3_model"), str(out), "--model", DIFFUSION, *flags]) == 0
    tensors = load_file(GOLDEN / "dit3_model.safetensors")
    loaded, metadata = load_model(out, task="diffusion")
    assert metadata.model_args == {
        "num_classes": 10, "in_chans": 4, "img_size": 16, "learn_sigma": True, **sizes
    }  # fmt: skip
    assert list(metadata.carried["input"]["input_size"]) == [4, 16, 16]
    process = {"objective": "noise", "schedule": "linear", "steps": 1000}
    assert metadata.carried["process"] == process
    with torch.no_grad():
        inputs = [tensors[f"input.{name}"] for name in "xty"]
        assert_close(loaded(*inputs), tensors["output.out"], 3.4e-5)
        by_name = create_model(
            DIFFUSION,
            pretrained=True,
            pretrained_cfg_overlay={"file": str(out), "num_classes": 10},
            **metadata.model_args,
        ).eval()
        assert_close(by_name(*inputs), tensors["output.out"], 3.4e-5)
    refused = "holds a diffusion model (for vision-ttt eval and sample)"
    for command, told in (
        (["export", str(out), str(tmp_path / "a.onnx")], f"{refused}, not a classifier"),
        (["predict", str(out), "--checkpoint", str(out)], f"{refused}; it predicts nothing"),
        (["eval", str(out)], "the checkpoint does not name its dataset; give --dataset"),
        (["eval", str(out), "--dataset", "digits"], "expects 4 channels; images are RGB, of 3"),
    ):
        assert main(command) == 2
        assert told in capsys.readouterr().err


def test_does_not_overwrite_silently(released, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    argv = ["convert", released("vit3_model"), str(out), *flags("vit3_tiny_patch16_224")]
    assert main(argv) == 2
    assert "already exists" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert main([*argv, "--overwrite"]) == 0
    assert load_model(out)[1].model == "vit3_tiny_patch16_224"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"--model": "vit3_tini_patch16_224"}, "nearest: vit3_tiny_patch16_224"),
        ({"--model": "deit_tiny_patch16_224"}, "no released weights are known for a model 'deit"),
        ({"--model": "hvit3_tiny"}, "these are weights of ViT³, and HViT3 takes those of H-ViT³"),
        ({"--model": "vit3_small_patch16_224"}, "missing blocks.10.attn.proj.bias"),
        ({"--model": DIFFUSION}, "these are weights of ViT³, and DiT3 takes those of DiT³"),
        ({"in": "absent.pth"}, "absent.pth"),
        ({"out": "weights.pth"}, "must be a .safetensors file"),
        ({"out": "absent/out.safetensors"}, "absent does not exist"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_and_write_nothing(change, told, released, tmp_path, capsys):
    given = {"in": released("vit3_model"), "out": str(tmp_path / "out.safetensors"),
             "--model": "vit3_tiny_patch16_224", **change}  # fmt: skip
    assert main(["convert", given["in"], given["out"], "--model", given["--model"]]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.glob("*.safetensors"))


def test_every_convertible_model_is_one_of_ours():
    names = convertible_models()
    assert {"vit3_base_patch16_224", "hvit3_small"} <= set(names)
    assert not any(name.startswith("vittt") for name in names)
