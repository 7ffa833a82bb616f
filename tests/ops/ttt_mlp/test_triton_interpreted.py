"""The Triton kernels of ttt_mlp, interpreted, against the dual form in float64.

The dual form is the definition to ten digits. The interpreter reproduces the kernels' roundings but
not their order of summation.
"""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_mlp_problems import OP, STATE, as_float64, make_problem, solve
from vision_ttt.ops import _learner_triton, ttt_mlp

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreted

CASES = [  # B, T, H, d, b; inner norm, position scale, one state per image
    ((1, 1, 1, 16, 16), True, "per head", False),
    ((2, 15, 1, 16, 16), False, "shared", True),
    ((1, 20, 2, 32, 16), True, None, True),  # several blocks of hidden units
    ((1, 4, 2, 16, 3), True, "per head", False),
    ((1, 40, 1, 16, 20), True, "per head", False),  # several tiles
    ((1, 24, 1, 16, 20), False, None, False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ((1, 60, 2, 16, 50), False, None, False),
            ((1, 150, 2, 16, 16), True, "shared", False),  # kept states
            ((1, 170, 1, 16, 20), True, "per head", False),
            ((1, 170, 1, 16, 20), False, "shared", False),
            ((1, 290, 2, 16, 16), False, None, False),
            ((1, 290, 1, 32, 100), True, None, True),
            ((1, 33, 1, 64, 16), True, "per head", False),
            ((1, 35, 1, 128, 32), True, "per head", False),
            ((2, 133, 3, 16, 3), True, "per head", True),
        )
    ),
]


def check(problem, dtype, **options):
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="triton", **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[dtype], name)
    return got


@pytest.mark.parametrize(("shape", "norm", "scale", "state_per_image"), CASES, ids=str)
def test_outputs_states_and_gradients(shape, norm, scale, state_per_image):
    options = {"norm": norm, "scale": scale, "state_per_image": state_per_image}
    problem = make_problem(*shape, **options, dtype=torch.float32)
    reverse_heads = shape[2] // 2 if norm else shape[2]
    check(problem, torch.float32, mini_batch_size=shape[-1], reverse_heads=reverse_heads)


@pytest.mark.parametrize(
    ("dtype", "norm", "size"),
    [
        (torch.bfloat16, True, 16),
        (torch.bfloat16, False, 16),
        (torch.float16, True, 20),
        pytest.param(torch.bfloat16, True, 20, marks=pytest.mark.slow),
        pytest.param(torch.float16, False, 16, marks=pytest.mark.slow),
    ],
)
def test_half_precisions(dtype, norm, size):
    problem = make_problem(1, 37, 1, 16, size, norm=norm, scale=None, dtype=dtype)
    results = check(problem, dtype, mini_batch_size=size, reverse_heads=1)
    assert results["o"].dtype == results["grad q"].dtype == dtype
    assert results["w1"].dtype == results["grad w1"].dtype == torch.float32


def test_large_activations_do_not_overflow():
    """Products far beyond float16's range, which no factor of a product may be rounded to."""
    problem = make_problem(1, 17, 1, 16, 16, dtype=torch.float16)
    large = {n: (x * 100 if n in "qkv" else x).detach() for n, x in problem.items()}
    results = solve({n: x.requires_grad_() for n, x in large.items()}, backend="triton")
    assert all(torch.isfinite(results[name]).all() for name in ("o", *STATE, "grad q"))


def test_hidden_units_of_any_size():
    """Where GELU is 0 or the identity, and between: from -500 to 500."""
    problem = make_problem(1, 20, 1, 16, 16, norm=False, scale=None, dtype=torch.float32)
    with torch.no_grad():
        problem["b1"].copy_(torch.linspace(-500, 500, 64) * torch.linspace(-1, 1, 64).abs() ** 3)
        problem["eta"].mul_(1e-6)
    check(problem, torch.float32, mini_batch_size=16)


def test_strided_views_of_one_projection_with_gradients():
    heads, dim = 2, 16
    problem = make_problem(1, 17, heads, dim, 16, dtype=torch.float32)
    fused = torch.cat([problem[name].detach().flatten(2) for name in "qkv"], dim=-1)
    fused.requires_grad_()
    views = [x.unflatten(-1, (heads, dim)) for x in fused.split(heads * dim, dim=-1)]
    options = {"mini_batch_size": 16, "reverse_heads": 1, "backend": "triton"}
    strided = ttt_mlp(**problem | dict(zip("qkv", views, strict=True)), **options)
    o = ttt_mlp(**problem, **options)
    assert torch.equal(strided, o)
    # The output's gradient, too, has the strides of a wider tensor.
    weights = torch.randn(1, 17, heads, 2 * dim)[..., :dim]
    (gradient,) = torch.autograd.grad((strided * weights).sum(), fused)
    separate = torch.autograd.grad((o * weights.contiguous()).sum(), [problem[n] for n in "qkv"])
    assert torch.equal(gradient, torch.cat([x.flatten(2) for x in separate], dim=-1))


def test_empty_rows_of_a_tile_leave_no_trace():
    """With eps = 0 and biases of zeros the empty rows' norm divides by 0: NaN, were they used."""
    problem = make_problem(1, 9, 1, 16, 16, dtype=torch.float32)
    for name in ("b1", "b2"):
        problem[name] = torch.zeros_like(problem[name]).requires_grad_()
    check(problem, torch.float32, mini_batch_size=16, reverse_heads=1, eps=0.0)


def test_the_kept_states_serve_either_backward():
    problem = make_problem(1, 140, 1, 16, 16, dtype=torch.float32)
    inputs = OP.inputs(*(x.detach() for x in problem.values()), 16, 1, 1e-6)
    triton, dual = OP.backends["triton"], OP.backends["dual"]
    results, others = (kernel.forward(inputs, True) for kernel in (triton, dual))
    assert results[5].shape[0] == 1
    for got, wanted in zip(results[5:], others[5:], strict=True):
        assert_close(got, wanted, 1e-6)
    got = triton.backward(inputs, *results[:5], *others[5:])
    wanted = dual.backward(inputs, *results[:5], *results[5:])
    for x, y in zip(got, wanted, strict=True):
        assert_close(x, y, 1e-5)


@pytest.mark.parametrize("size", [16, 20])
def test_every_output_is_written(size, monkeypatch):
    """Buffers that start as NaN: what a kernel forgets to write, or reads too early, shows."""
    fill = _learner_triton.LearnerCall.empty

    def poisoned(self, *shape, dtype=torch.float32):
        return fill(self, *shape, dtype=dtype).fill_(float("nan"))

    monkeypatch.setattr(_learner_triton.LearnerCall, "empty", poisoned)
    problem = make_problem(1, 21, 1, 16, size, scale="shared", dtype=torch.float32)
    check(problem, torch.float32, mini_batch_size=size)


def test_nan_reaches_its_own_mini_batch_and_later_ones():
    problem = make_problem(1, 20, 2, 16, 16, dtype=torch.float32)
    problem = {name: x.detach() for name, x in problem.items()}
    problem["v"][0, 17, 0] = float("nan")
    o = ttt_mlp(**problem, mini_batch_size=16, backend="triton")
    assert torch.isfinite(o[0, :16]).all()
    assert torch.isfinite(o[0, :, 1]).all()
    assert torch.isnan(o[0, 17:, 0]).all()


def test_no_image_at_all():
    problem = make_problem(0, 17, 2, 16, 16, dtype=torch.float32)
    results = solve(problem, backend="triton", mini_batch_size=16)
    assert results["o"].shape == (0, 17, 2, 16)
    assert not any(results[f"grad {name}"].any() for name in STATE)
