"""Released weights under our names: what fits loads strictly, what does not is named."""

import argparse
import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import mamba_goldens
from tolerances import assert_close
from vision_ttt import convert
from vision_ttt.convert.dit3 import DIT3
from vision_ttt.convert.mamba import MAMBA_REG, VIM
from vision_ttt.models.dit3 import DiT3
from vision_ttt.models.h_vit3 import HViT3
from vision_ttt.models.mamba_reg import MambaReg
from vision_ttt.models.registry import create_model
from vision_ttt.models.vim import Vim
from vision_ttt.models.vit3 import ViT3

GOLDEN = Path(__file__).parents[1] / "golden"
CLASSES = {"vit3_model": ViT3, "h_vit3_model": HViT3}


def golden(name):
    """The release's state dict, a model of its size, an image and its logits."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    arguments = json.loads((GOLDEN / f"{name}.json").read_text())["config"]["kwargs"]
    if "dim" in arguments:
        arguments["dims"] = arguments.pop("dim")
    released = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    model = CLASSES[name](**arguments).eval()
    return released, model, tensors["input.image"], tensors["output.logits"]


@pytest.mark.parametrize("name", CLASSES)
def test_released_weights_load_strictly_and_compute_the_same(name):
    released, model, image, logits = golden(name)
    before = dict(released)
    converted = convert.remap(released, model)
    model.load_state_dict(converted, strict=True)
    assert_close(model(image), logits, 2e-5)
    assert released == before
    with torch.device("meta"):
        shapes = {key: x.shape for key, x in model.state_dict().items()}
    assert {key: x.shape for key, x in converted.items()} == shapes


def test_every_released_tensor_is_used_once():
    released, model, *_ = golden("vit3_model")
    used = [x.data_ptr() for x in convert.remap(released, model).values()]
    assert sorted(used) == sorted(x.data_ptr() for x in released.values())


@pytest.mark.parametrize("name", CLASSES)
def test_missing_left_over_and_misshapen_tensors_are_named(name):
    released, model, *_ = golden(name)
    head = released["head.weight"]
    lost = next(key for key in released if key.endswith("attn.qkv.weight"))
    broken = {key: x for key, x in released.items() if key != lost}
    broken |= {"teacher.weight": head, "head.weight": head[:4]}
    with pytest.raises(ValueError, match="missing") as error:
        convert.remap(broken, model)
    told = str(error.value)
    assert f"missing {lost};" in told
    assert "unexpected teacher.weight;" in told
    assert f"of another shape head.weight [4, 96] for {list(head.shape)}" in told


@pytest.mark.parametrize("problem", ["missing", "unexpected", "of another shape"])
def test_one_problem_alone_is_enough(problem):
    released, model, *_ = golden("vit3_model")
    head = released.pop("head.bias")
    if problem == "unexpected":
        released |= {"head.bias": head, "extra": head}
    elif problem == "of another shape":
        released |= {"head.bias": head[:4]}
    with pytest.raises(ValueError, match=f"{problem} (head.bias|extra)"):
        convert.remap(released, model)


def test_long_lists_are_cut_short():
    released, model, *_ = golden("vit3_model")
    with pytest.raises(ValueError, match=r"missing blocks\.0\..*, .* and 33 more; unexpected none"):
        convert.remap({"head.weight": released["head.weight"]}, model)


def test_another_familys_weights_are_refused_by_name():
    plain, plain_model, *_ = golden("vit3_model")
    hierarchical, hierarchical_model, *_ = golden("h_vit3_model")
    with pytest.raises(ValueError, match="weights of H-ViT³, and ViT3 takes those of ViT³"):
        convert.remap(hierarchical, plain_model)
    with pytest.raises(ValueError, match="weights of ViT³, and HViT3 takes those of H-ViT³"):
        convert.remap(plain, hierarchical_model)
    vittt = timm.create_model("vittt_nano_patch4_32")
    with pytest.raises(ValueError, match=r"no release is known for Vittt; .* ViT3, HViT3"):
        convert.remap(plain, vittt)


def test_unknown_weights_are_not_those_of_a_classifier():
    """Blocks may have the same names as ViT³'s."""
    released, model, *_ = golden("vit3_model")
    diffusion = {key: x for key, x in released.items() if not key.startswith(("patch", "head"))}
    diffusion["x_embedder.proj.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"missing head\.bias, head\.weight, patch_embed") as error:
        convert.remap(diffusion, model)
    assert "unexpected x_embedder.proj.weight" in str(error.value)


def diffusion(**options):
    """DiT³'s released weights and a model of their size."""
    tensors = load_file(GOLDEN / "dit3_model.safetensors")
    arguments = json.loads((GOLDEN / "dit3_model.json").read_text())["config"]["kwargs"]
    released = {key[8:]: x for key, x in tensors.items() if key.startswith("weights.")}
    return released, DiT3(**{**arguments, **options})


def test_every_released_tensor_of_a_diffusion_model_but_its_table_is_used_once():
    released, model = diffusion()
    converted = convert.remap(released, model)
    model.load_state_dict(converted, strict=True)
    used = sorted(x.data_ptr() for x in converted.values())
    table = released.pop("pos_embed")
    assert used == sorted(x.data_ptr() for x in released.values())
    for positions in (table.flip(1), table[:, :63], table[..., :94], table.expand(2, -1, -1)):
        with pytest.raises(ValueError, match="pos_embed is not the table of sines and cosines"):
            convert.remap({**released, "pos_embed": positions}, model)


def test_a_diffusion_model_of_another_shape_is_named():
    released, model = diffusion(learn_sigma=False, num_classes=9)
    with pytest.raises(ValueError, match="of another shape") as error:
        convert.remap(released, model)
    assert "y_embedder.embedding_table.weight [11, 96] for [10, 96]" in str(error.value)
    assert "final_layer.linear.bias [32] for [16]" in str(error.value)
    with pytest.raises(ValueError, match="weights of DiT³, and ViT3 takes those of ViT³"):
        convert.remap(released, golden("vit3_model")[1])


def test_what_diffusion_weights_tell_of_the_model():
    released, _ = diffusion()
    told = {"num_classes": 10, "in_chans": 4, "img_size": 16, "learn_sigma": True}
    assert DIT3.arguments(released) == told
    assert DIT3.arguments({}) == {}
    half = {**released, "final_layer.linear.bias": torch.zeros(16)}
    assert DIT3.arguments(half) == {**told, "learn_sigma": False}


REGISTERS = ("mambar_model_cls3_reduce1", "mambar_model_cls3_reduce3")


def scans(name):
    """The released weights of Vim or Mamba-Reg, and a model of their size."""
    tensors, arguments, _ = mamba_goldens.read(name)
    if name in REGISTERS:
        model = MambaReg(**mamba_goldens.mamba_reg_arguments(arguments))
    else:
        model = Vim(**mamba_goldens.vim_arguments(arguments))
    return mamba_goldens.weights(tensors), model


@pytest.mark.parametrize("name", ["vim_model", *REGISTERS])
def test_every_number_of_both_directions_is_used_once(name):
    """What they compute is compared in the tests of the models."""
    released, model = scans(name)
    numbered, total = {}, 0
    for key, x in released.items():
        numbers = torch.arange(total, total + x.numel(), dtype=torch.float64)
        numbered[key] = numbers.view_as(x)
        total += x.numel()
    converted = convert.remap(numbered, model)
    assert {key: x.shape for key, x in converted.items()} == {
        key: x.shape for key, x in model.state_dict().items()
    }
    used = torch.cat([x.flatten() for x in converted.values()])
    assert torch.equal(used.sort().values, torch.arange(total, dtype=torch.float64))


@pytest.mark.parametrize("count", [4, 16, 25])
def test_the_class_tokens_position_is_the_one_in_the_middle(count):
    released, _ = scans("vim_model")
    positions = torch.arange(count + 1).view(1, -1, 1).expand(1, -1, 64)
    side = math.isqrt(count)
    released |= {"pos_embed": positions.float()}
    model = Vim(16 * side, depth=2, embed_dim=64, num_classes=10)
    converted = convert.remap(released, model)
    order = torch.arange(count).view(1, -1, 1).expand(1, -1, 64).float()
    model.load_state_dict(converted)
    model.patch_embed.proj.weight.data.zero_()
    model.patch_embed.proj.bias.data.zero_()
    model.class_tokens.tokens.data.zero_()
    tokens, _ = model.embed(torch.zeros(1, 3, 16 * side, 16 * side))
    assert torch.equal(tokens, positions.float())
    assert converted["class_tokens.pos_embed"].unique().item() == count // 2
    assert converted["pos_embed"].shape == order.shape


@pytest.mark.parametrize(("pool", "place"), [("head", 0), ("middle", 8), ("end", 16)])
def test_the_class_tokens_position_is_where_the_model_has_it(pool, place):
    released, _ = scans("vim_model")
    positions = torch.arange(17.0).view(1, -1, 1).expand(1, -1, 64)
    model = Vim(64, depth=2, embed_dim=64, num_classes=10, global_pool=pool)
    converted = convert.remap(released | {"pos_embed": positions}, model)
    assert converted["class_tokens.pos_embed"].unique().tolist() == [place]
    own = converted["pos_embed"][0, :, 0].tolist()
    assert own == [float(n) for n in range(17) if n != place]


def test_a_model_without_class_token_refuses_one_by_the_releases_names():
    released, _ = scans("vim_model")
    model = Vim(64, depth=2, embed_dim=64, num_classes=10, global_pool="avg")
    with pytest.raises(ValueError, match=r"unexpected cls_token; .* pos_embed \[1, 17, 64\]"):
        convert.remap(released, model)


def test_what_the_weights_of_selective_scans_tell_of_the_model():
    told = {"num_classes": 10, "in_chans": 3, "img_size": 64}
    assert VIM.arguments(scans("vim_model")[0]) == told
    for name, reduction in zip(REGISTERS, (1, 3), strict=True):
        wanted = {**told, "num_registers": 3, "head_reduction": reduction}
        assert MAMBA_REG.arguments(scans(name)[0]) == wanted
    assert VIM.arguments({}) == {}
    for shape in ([64, 96], [192, 96], [0, 96]):
        necks = {"neck.weight": torch.zeros(shape)}
        with pytest.raises(convert.ConversionError, match=r"head_reduction .* whole number: neck"):
            MAMBA_REG.arguments(necks)


def test_vims_and_mamba_regs_weights_are_told_apart():
    vim, vim_model = scans("vim_model")
    registers, registers_model = scans(REGISTERS[0])
    with pytest.raises(ValueError, match="weights of Mamba-Reg, and Vim takes those of Vim"):
        convert.remap(registers, vim_model)
    with pytest.raises(ValueError, match="weights of Vim, and MambaReg takes those of Mamba-Reg"):
        convert.remap(vim, registers_model)
    with pytest.raises(ValueError, match="weights of Mamba-Reg, and ViT3 takes those of ViT³"):
        convert.remap(registers, golden("vit3_model")[1])


def test_directions_that_do_not_fit_are_named():
    released, model = scans("vim_model")
    lost = released.pop("layers.1.mixer.D_b")
    prefix = "layers.0.mixer"
    released[f"{prefix}.A_b_log"] = released[f"{prefix}.A_b_log"][:, :8]
    for part in ("A_log", "D", "D_b"):
        released[f"{prefix}.{part}"] = released[f"{prefix}.{part}"][:64]
    with pytest.raises(ValueError, match=r"missing layers\.1\.mixer\.D_b; unexpected none") as e:
        convert.remap(released, model)
    said = str(e.value)
    assert f"{prefix}.D [64] + {prefix}.D_b [64] for [256]" in said
    assert f"{prefix}.A_log [64, 16] + {prefix}.A_b_log [128, 8] for [256, 16]" in said
    assert lost.shape == (128,)


def test_rotations_that_the_model_does_not_compute_are_refused():
    released, model, *_ = golden("h_vit3_model")
    key = "layers.2.blocks.0.rope.rotations"
    other = {**released, key: released[key].roll(1, dims=0)}
    with pytest.raises(ValueError, match=r"layers\.2\.blocks\.0\.rope\.rotations is not the table"):
        convert.remap(other, model)


@pytest.mark.parametrize(
    "shape", [(), (0,), (1, 0, 64), (2, 3, 4, 2), (1, 2, 3, 2), (1, 4, 4, 3)], ids=str
)
@pytest.mark.parametrize("family", convert.FAMILIES, ids=lambda family: family.name)
def test_tensors_of_any_shape_are_named(family, shape):
    """Of damaged files, and of others: an argument may follow from each of these."""
    names = {
        *family.hallmarks,
        *("patch_embed.proj.weight", "head.weight", "cls_token", "pos_embed", "neck.weight"),
        *("x_embedder.proj.weight", "y_embedder.embedding_table.weight", "pos_embed_cls"),
        *("final_layer.linear.bias", "layers.0.blocks.0.attn.rope.rotations"),
    } - family.lacks
    released = dict.fromkeys(names, torch.zeros(shape))
    models = {
        "ViT³": "vit3_tiny_patch16_224",
        "H-ViT³": "hvit3_tiny",
        "DiT³": "dit3_nano_patch4_32",
        "Vim": "vim_tiny_patch16_224",
        "Mamba-Reg": "mambar_tiny_patch16_224",
        "Vision-RWKV": "vrwkv_tiny_patch16_224",
    }
    with torch.device("meta"):
        model = create_model(models[family.name])
    with suppress(convert.ConversionError):
        assert isinstance(family.arguments(released), dict)
    with pytest.raises(convert.ConversionError):
        convert.remap(released, model)


def test_a_moving_average_comes_before_the_weights(tmp_path):
    path = tmp_path / "weights.pt"
    average, weights = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    told = argparse.Namespace(model="DiT-S/2")
    torch.save({"model": weights, "ema": average, "opt": {"lr": 1}, "args": told}, path)
    assert convert.read_release(path) == average


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_reading_released_files(tmp_path, suffix, nested, wrapped):
    released, *_ = golden("vit3_model")
    written = {f"module.{key}" if wrapped else key: x for key, x in released.items()}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(written, path)
    else:
        torch.save({"model": written, "epoch": 299} if nested else written, path)
    got = convert.read_release(path)
    assert got.keys() == released.keys()
    assert all(torch.equal(x, released[key]) for key, x in got.items())


class Config:
    """Something that is not a tensor."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"a": torch.ones(1)}, "config": Config()},
            r"could run code, .* not loaded \(Unsupported global: GLOBAL \S+\.Config was not an "
            r"allowed global by default\); save its",
        ),
        ({"epoch": 3}, 'holds no weights: .* or one under "model"'),
        ([torch.ones(1)], "holds no weights"),
        ({}, "holds no weights"),
        ({0: torch.ones(1)}, "holds no weights"),
    ],
)
def test_files_without_plain_weights_are_refused(tmp_path, content, message):
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    with pytest.raises(convert.ConversionError, match=message):
        convert.read_release(path)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"weights", b"PK\x03\x04"])
def test_files_that_are_something_else_are_refused(tmp_path, suffix, content):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        convert.read_release(path)


def test_truncated_and_absent_files(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"weights\.pth is truncated or no file of torch"):
        convert.read_release(path)
    with pytest.raises(FileNotFoundError):
        convert.read_release(tmp_path / "absent.pth")
