"""ViT³'s released TTT block as a configuration of the generic learner."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tolerances import assert_close
from vision_ttt.inner import DepthwiseConv3x3, Learner, SimplifiedGLU

GOLDEN = Path(__file__).parents[1] / "golden" / "vit3_ttt_block"


def released_loss(prediction, target):
    """The release divides by √9 in both branches, whatever the width of a head."""
    return -(prediction * target).sum() / (3 * prediction.shape[0])


@pytest.mark.parametrize("checkpoint", [False, True])
def test_released_block(checkpoint):
    """Output, trained inner weights and every gradient: supplement, Sec. 3, with soft clipping."""
    tensors = load_file(GOLDEN.with_suffix(".safetensors"))
    description = json.loads(GOLDEN.with_suffix(".json").read_text())
    config = description["config"]
    heads, dim = config["num_heads"], config["dim"] // config["num_heads"]
    leaves = {
        name.removeprefix("weights."): x.requires_grad_()
        for name, x in tensors.items()
        if name.startswith("weights.") or name == "input.x"
    }
    x = leaves["input.x"]
    projected = F.linear(x, leaves["qkv.weight"], leaves["qkv.bias"])
    views = projected.split([config["dim"]] * 3 + [dim] * 3, dim=-1)
    views = [view.unflatten(-1, (-1, dim)) for view in views]  # [B, T, heads or 1, d]

    def run(model, views, state):
        learner = Learner(model, released_loss, clip_axes=model.clip_axes, checkpoint=checkpoint)
        return learner(*views, state, return_state=True)

    glu = {name: leaves[name].squeeze(0) for name in ("w1", "w2")}
    o1, glu = run(SimplifiedGLU(), views[:3], glu)
    convolution = DepthwiseConv3x3((config["h"], config["w"]))
    o2, kernel = run(convolution, views[3:], {"w": leaves["w3"].transpose(0, 1)})
    y = torch.cat([o1.flatten(2), o2.flatten(2)], dim=-1)
    y = F.linear(y, leaves["proj.weight"], leaves["proj.bias"])
    (y * tensors["input.proj_y"]).sum().backward()

    tolerance = description["tolerance"]
    results = {"y": y, "w1_new": glu["w1"], "w2_new": glu["w2"]}
    results["w3_new"] = kernel["w"].flatten(0, 2).unsqueeze(1)
    for name, value in results.items():
        assert_close(value, tensors[f"output.{name}"], tolerance["forward"], name)
    assert heads == glu["w1"].shape[1]
    for name, leaf in leaves.items():
        wanted = tensors[f"output.grad.{name}"]
        assert_close(leaf.grad, wanted, tolerance["gradients"], name)
