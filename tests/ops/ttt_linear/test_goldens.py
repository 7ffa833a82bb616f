"""Tensors computed by the authors' released code: outputs, final states and every gradient."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tolerances import assert_close
from ttt_linear_problems import BACKENDS
from vision_ttt.ops import ttt_linear

GOLDEN = Path(__file__).parents[2] / "golden"
TTT_LM = sorted(path.stem for path in GOLDEN.glob("ttt_linear_op_*.json"))


def load(name):
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    return load_file(GOLDEN / f"{name}.safetensors"), description


def test_the_goldens_are_there():
    assert len(TTT_LM) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TTT_LM)
def test_ttt_lm_release(name, backend):
    """Released layout [B, H, T, d] and bias [H, 1, d]; its lr is eta, its token_idx the scale."""
    tensors, description = load(name)
    leaves = {
        key.removeprefix("input."): x.requires_grad_("proj" not in key)
        for key, x in tensors.items()
        if key.startswith("input.")
    }
    q, k, v = (leaves[key].transpose(1, 2) for key in "qkv")  # [B, T, H, d]
    o, (w, b, *_) = ttt_linear(
        q,
        k,
        v,
        leaves["lr"].transpose(1, 2),
        leaves["W1"],
        leaves["b1"].squeeze(1),
        leaves["ln_weight"],
        leaves["ln_bias"],
        mini_batch_size=description["config"]["mini_batch_size"],
        position_scale=leaves["token_idx"],
        return_state=True,
        backend=backend,
    )
    results = {"o": o.transpose(1, 2), "W1_final": w, "b1_final": b.unsqueeze(2)}
    loss = (
        (results["o"] * leaves["proj_o"]).sum()
        + (w * leaves["proj_W1"]).sum()
        + (results["b1_final"] * leaves["proj_b1"]).sum()
    )
    loss.backward()
    tolerance = description["tolerance"]
    for key, wanted in results.items():
        assert_close(wanted, tensors[f"output.{key}"], tolerance["forward"], key)
    gradients = [key for key in tensors if key.startswith("output.grad.")]
    assert len(gradients) == 9
    for key in gradients:
        leaf = leaves[key.removeprefix("output.grad.")]
        assert_close(leaf.grad, tensors[key], tolerance["gradients"], key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_flash_linear_attention(backend):
    """Its learning rate belongs to the query row: a position scale that changes per mini-batch,
    with eta = 1. Its residual is the pre-norm output z: o = z + LN(z), where ours is q + LN(z), so
    that LN(o - LN(z)) = LN(z)."""
    name = "ttt_linear_fla_naive_scale1_T48"
    tensors, description = load(name)
    x = {key.removeprefix("input."): value for key, value in tensors.items()}
    size = description["config"]["mini_batch_size"]
    state, outputs = (x["h0"], x["hb0"].squeeze(2)), []
    for start in range(0, x["q"].shape[1], size):
        part = slice(start, start + size)
        scale = x["eta"][0, part, :, 0].T.contiguous()  # [H, b]
        o, (*state, _, _, _, _, _) = ttt_linear(
            *(x[key][:, part] for key in "qkv"),
            torch.ones(x["eta"][:, part, :, 0].shape),
            *state,
            x["w"],
            x["b"],
            mini_batch_size=size,
            position_scale=scale,
            return_state=True,
            backend=backend,
        )
        outputs.append(o - x["q"][:, part])  # LN(z)
    normed = torch.cat(outputs, dim=1)
    z = tensors["output.o"] - normed
    mean, variance = z.mean(-1, keepdim=True), z.var(-1, unbiased=False, keepdim=True)
    again = (z - mean) / (variance + 1e-6).sqrt() * x["w"] + x["b"]
    tolerance = description["tolerance"]["forward"]
    assert_close(again, normed, tolerance)
    assert_close(state[0], tensors["output.ht"], tolerance)
    assert_close(state[1], tensors["output.hbt"].squeeze(2), tolerance)
