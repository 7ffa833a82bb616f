"""The compiled kernels over the cases they serve, against the dual form in float64."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_mlp_problems import STATE, as_float64, make_problem, solve
from vision_ttt.ops._learner_dual import num_checkpoints

pytestmark = pytest.mark.kernels

SHAPES = [  # B, T, H, d, b: every dimension, ragged ends, mini-batches from 1 to 64
    (1, 1, 1, 16, 16),
    (2, 15, 2, 16, 16),
    (1, 16, 3, 32, 16),
    (1, 17, 2, 32, 1),
    (1, 196, 2, 64, 16),
    (1, 300, 2, 16, 3),
    (1, 70, 2, 128, 64),
    (2, 33, 2, 32, 50),
]


def check(problem, **options):
    """A result in float32 is that exact whatever the views' dtype."""
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="cpu", **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[got[name].dtype], name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("norm", "scale"), [(True, "per head"), (True, None), (False, "shared")])
def test_outputs_states_and_gradients(shape, norm, scale, dtype):
    # The dual form in float64 stands in for the reference, which it is to ten digits.
    problem = make_problem(*shape, norm=norm, scale=scale, dtype=dtype)
    check(problem, mini_batch_size=shape[-1], reverse_heads=shape[2] // 2)


def test_the_shapes_above_reach_kept_states():
    assert max(num_checkpoints(shape[1], *shape[3:], layers=2) for shape in SHAPES) >= 2


@pytest.mark.parametrize("reverse_heads", [0, 3])
def test_all_heads_in_one_direction(reverse_heads):
    problem = make_problem(2, 37, 3, 32, 16, dtype=torch.float32)
    check(problem, mini_batch_size=16, reverse_heads=reverse_heads)


def test_a_long_sequence():
    problem = make_problem(1, 1600, 2, 64, 16, dtype=torch.float32)
    check(problem, mini_batch_size=16, reverse_heads=1)


def test_more_states_between_two_kept_ones_than_are_held():
    """Online learning of wide heads: 1024 mini-batches between kept states, 256 states held."""
    problem = make_problem(1, 300, 1, 128, 1, dtype=torch.float32)
    check(problem, mini_batch_size=1)


def test_the_state_may_have_its_batch_axis_in_some_tensors_only():
    problem = make_problem(2, 20, 2, 16, 16, dtype=torch.float32)
    for name in ("b1", "w2"):
        x = problem[name].detach()
        problem[name] = torch.stack([x, 0.5 * x]).requires_grad_()
    check(problem, mini_batch_size=16)


def test_activations_of_any_size():
    """Where GELU is 0 or the identity, and between: hidden units from -500 to 500."""
    problem = make_problem(1, 32, 1, 16, 16, norm=False, scale=None, dtype=torch.float32)
    with torch.no_grad():
        problem["b1"].copy_(torch.linspace(-500, 500, 64) * torch.linspace(-1, 1, 64).abs() ** 3)
        problem["eta"].mul_(1e-6)
    check(problem, mini_batch_size=16)


def test_an_empty_batch():
    problem = make_problem(0, 20, 2, 16, 16, dtype=torch.float32)
    results = solve(problem, backend="cpu")
    assert results["o"].shape == (0, 20, 2, 16)
    assert all(not results[f"grad {name}"].any() for name in STATE)
