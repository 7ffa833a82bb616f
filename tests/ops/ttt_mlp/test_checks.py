"""Bad input to ttt_mlp: an error that names what came and what is accepted."""

import numpy as np
import pytest
import torch

from ttt_mlp_problems import make_problem
from vision_ttt.ops import ttt_mlp


def call(change=None, **options):
    problem = {n: x.detach() for n, x in make_problem(2, 6, 3, 8, 4, dtype=torch.float32).items()}
    return ttt_mlp(**problem | (change or {}), **{"mini_batch_size": 4, **options})


def test_the_unchanged_problem_is_accepted():
    assert call().shape == (2, 6, 3, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 6, 24)}, r"ttt_mlp: q must have shape \[B, T, H, d\], got \[2, 6, "),
        ({"k": torch.zeros(2, 5, 3, 8)}, r"k must have shape \[2, 6, 3, 8\], got \[2, 5"),
        ({"v": torch.zeros(2, 6, 3, 4)}, r"v must have shape \[2, 6, 3, 8\], got \[2, 6, 3, 4\]"),
        ({"eta": torch.zeros(2, 6)}, r"eta must have shape \[2, 6, 3\], got \[2, 6\]"),
        (
            {"w1": torch.zeros(3, 8, 8)},
            r"w1 must have shape \[3, 8, 4\*d = 32\] or \[2, 3, 8, 4\*d = 32\], got \[3, 8, 8\]",
        ),
        (
            {"b1": torch.zeros(32)},
            r"b1 must have shape \[3, 4\*d = 32\] or \[2, 3, 4\*d = 32\], got \[32\]",
        ),
        ({"w2": torch.zeros(3, 8, 32)}, r"w2 must have shape \[3, 4\*d = 32, 8\] or .* got"),
        ({"b2": torch.zeros(3, 32)}, r"b2 must have shape \[3, 8\] or \[2, 3, 8\], got \[3, 32\]"),
        ({"ln_weight": torch.zeros(8)}, r"ln_weight must have shape \[3, 8\]"),
        ({"ln_bias": None}, "both ln_weight and ln_bias"),
        ({"position_scale": torch.zeros(5)}, r"position_scale must have shape \[4\] or \[3, 4\]"),
        ({"k": torch.zeros(2, 6, 3, 8, device="meta")}, "k is on meta, q on cpu"),
        ({"b2": torch.zeros(3, 8, device="meta")}, "b2 is on meta, q on cpu"),
        ({"q": torch.zeros(2, 6, 8, 3).transpose(2, 3)}, "last axis must be contiguous"),
    ],
)
def test_shapes(change, message):
    with pytest.raises(ValueError, match=message):
        call(change)


def test_empty_sequence():
    empty = torch.zeros(2, 0, 3, 8)
    with pytest.raises(ValueError, match=r"T must be at least 1, got q \[2, 0, 3, 8\]"):
        call({"q": empty, "k": empty, "v": empty, "eta": torch.zeros(2, 0, 3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 6, 3, 8, dtype=torch.int64)}, "q must be one of .*got torch.int64"),
        ({"k": torch.zeros(2, 6, 3, 8, dtype=torch.bfloat16)}, "must share a dtype, got"),
        ({"eta": torch.ones(2, 6, 3, dtype=torch.int32)}, r"eta must be one of .*got torch.int32"),
        ({"w2": torch.zeros(3, 32, 8, dtype=torch.float64)}, "w2 is float64, q is not"),
        ({"q": np.zeros((2, 6, 3, 8))}, "q must be a tensor, got ndarray"),
    ],
)
def test_dtypes(change, message):
    with pytest.raises(TypeError, match=message):
        call(change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
        ({"reverse_heads": 4}, r"reverse_heads must be in 0 … 3, got 4"),
        ({"reverse_heads": -1}, r"reverse_heads must be in 0 … 3, got -1"),
        ({"eps": -1e-6}, "eps must be at least 0, got -1e-06"),
        ({"backend": "magic"}, r"unknown backend 'magic' \(from backend=\); available: \['cpu'"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        call(**options)


@pytest.mark.parametrize("options", [{"mini_batch_size": 4.0}, {"reverse_heads": True}])
def test_counts_must_be_integers(options):
    ((name, value),) = options.items()
    with pytest.raises(TypeError, match=f"{name} must be an int, got {value}"):
        call(**options)


def test_a_misspelt_option_is_not_swallowed():
    with pytest.raises(TypeError, match="minibatch_size"):
        call(minibatch_size=4)
