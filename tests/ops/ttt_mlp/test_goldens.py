"""Tensors computed by the authors' released code: outputs, final states and every gradient."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tolerances import assert_close
from ttt_mlp_problems import BACKENDS
from vision_ttt.ops import ttt_mlp

GOLDEN = Path(__file__).parents[2] / "golden"
TTT_LM = sorted(path.stem for path in GOLDEN.glob("ttt_mlp_op_*.json"))


def test_the_goldens_are_there():
    assert len(TTT_LM) == 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TTT_LM)
def test_ttt_lm_release(name, backend):
    """Released layout [B, H, T, d] and biases [H, 1, i]; its lr is eta, its token_idx the scale."""
    description = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    leaves = {
        key.removeprefix("input."): x.requires_grad_("proj" not in key)
        for key, x in tensors.items()
        if key.startswith("input.")
    }
    q, k, v = (leaves[key].transpose(1, 2) for key in "qkv")  # [B, T, H, d]
    o, (w1, b1, w2, b2, *_) = ttt_mlp(
        q,
        k,
        v,
        leaves["lr"].transpose(1, 2),
        leaves["W1"],
        leaves["b1"].squeeze(1),
        leaves["W2"],
        leaves["b2"].squeeze(1),
        leaves["ln_weight"],
        leaves["ln_bias"],
        mini_batch_size=description["config"]["mini_batch_size"],
        position_scale=leaves["token_idx"],
        return_state=True,
        backend=backend,
    )
    state = {"W1": w1, "b1": b1.unsqueeze(2), "W2": w2, "b2": b2.unsqueeze(2)}
    results = {"o": o.transpose(1, 2)} | {f"{key}_final": x for key, x in state.items()}
    loss = (results["o"] * leaves["proj_o"]).sum()
    for key, x in state.items():
        loss = loss + (x * leaves[f"proj_{key}"]).sum()
    loss.backward()
    tolerance = description["tolerance"]
    for key, got in results.items():
        assert_close(got, tensors[f"output.{key}"], tolerance["forward"], key)
    gradients = [key for key in tensors if key.startswith("output.grad.")]
    assert len(gradients) == 11
    for key in gradients:
        leaf = leaves[key.removeprefix("output.grad.")]
        assert_close(leaf.grad, tensors[key], tolerance["gradients"], key)
