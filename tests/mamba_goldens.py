"""What the tests of Vim and Mamba-Reg share: models with released weights, and their gradients."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt import convert

GOLDEN = Path(__file__).parent / "golden"


def read(name):
    """The tensors of a golden, its release's constructor arguments and its tolerances."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    return tensors, description["config"]["kwargs"], description["tolerance"]


_SIZES = ("img_size", "patch_size", "depth", "embed_dim", "num_classes")


def vim_arguments(released):
    """Vim's constructor arguments from its release's."""
    return {key: released[key] for key in (*_SIZES, "stride")}


def mamba_reg_arguments(released):
    """Mamba-Reg's constructor arguments from its release's."""
    sizes = {key: released[key] for key in _SIZES}
    registers, reduction = released["num_cls_tokens"], released["cls_reduce"]
    return {**sizes, "num_registers": registers, "head_reduction": reduction}


def weights(tensors, prefix="weights."):
    return {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}


def check(model, tensors, tolerance):
    """Compare tokens, every block, feature, logits and all given gradients with a golden's."""
    model.load_state_dict(convert.remap(weights(tensors), model))
    model.eval()
    outputs = {}
    for index, block in enumerate(model.blocks):
        block.mixer.register_forward_hook(
            lambda *call, name=f"layer{index}.mixer_out": outputs.update({name: call[2]})
        )
        block.register_forward_pre_hook(
            lambda block, x, name=f"layer{index}.residual": outputs.update({name: x[0]})
        )
    image = tensors["input.image"].requires_grad_()
    tokens = model.forward_features(image)
    outputs["tokens"] = model.embed(image)[0]
    outputs["features"] = model.forward_head(tokens, pre_logits=True)
    outputs["logits"] = model.forward_head(tokens)
    assert {f"output.{key}" for key in outputs} <= tensors.keys()
    for key, got in outputs.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)
    assert_close(model(image), outputs["logits"], 1e-6)

    (outputs["logits"] * tensors["input.proj_logits"]).sum().backward()
    assert_close(image.grad, tensors["output.grad.input.image"], tolerance["gradients"], "image")
    # A released gradient is of a part of one of ours. It is converted as the weights are, beside
    # NaN for the gradients that the golden leaves out.
    given = weights(tensors, "output.grad.")
    del given["input.image"]
    assert len(given) > 25
    released = {
        key: given.get(key, torch.full_like(x, torch.nan)) for key, x in weights(tensors).items()
    }
    wanted, compared = convert.remap(released, model), 0
    for key, parameter in model.named_parameters():
        known = ~wanted[key].isnan()
        if known.any():
            gradient, own = (x.where(known, 0) for x in (wanted[key], parameter.grad))
            assert_close(own, gradient, tolerance["gradients"], key)
            compared += known.sum().item()
    assert compared == sum(x.numel() for x in given.values())
