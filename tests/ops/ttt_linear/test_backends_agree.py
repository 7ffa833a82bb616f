"""Every backend computes the reference's function: outputs, states and all gradients."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_linear_problems import (
    BACKENDS,
    KERNELS,
    as_float64,
    exact_dtype,
    make_problem,
    solve,
)
from vision_ttt.ops import ttt_linear

LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [  # B, T, H, d, b
    (1, 1, 1, 4, 16),
    (2, 15, 2, 8, 16),
    (2, 16, 1, 16, 16),
    (1, 17, 3, 4, 1),
    (2, 37, 3, 8, 4),
    (1, 100, 2, 16, 3),
    (2, 33, 4, 8, 50),
]


def check(problem, backend, **options):
    """A result in float32 is that exact whatever the views' dtype."""
    wanted = solve(as_float64(problem), backend="reference", **options)
    got = solve(problem, backend=backend, **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[got[name].dtype], name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, "per head"])
def test_dual_is_the_reference_to_ten_digits(shape, norm, scale):
    heads = shape[2]
    for reverse_heads in {heads // 2, heads}:
        problem = make_problem(*shape, norm=norm, scale=scale)
        options = {"mini_batch_size": shape[-1], "reverse_heads": reverse_heads}
        check(problem, "dual", **options)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("scale", [None, "shared"])
def test_state_per_image_and_shared_position_scale(backend, scale):
    dtype = exact_dtype(backend)
    problem = make_problem(state_per_image=True, scale=scale, dtype=dtype)
    check(problem, backend, mini_batch_size=4, reverse_heads=1)


@pytest.mark.parametrize("backend", KERNELS)
def test_eps_is_used(backend):
    problem = make_problem(dtype=exact_dtype(backend))
    check(problem, backend, mini_batch_size=4, eps=0.1)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [True, False])
def test_lower_precisions(backend, dtype, norm):
    if backend == "cpu" and dtype == torch.float16:
        with pytest.raises(ValueError, match=r"dtype torch.float16 is not one of"):
            solve(make_problem(dtype=dtype), backend=backend, mini_batch_size=4)
        return
    problem = make_problem(2, 83, 2, 32, 16, norm=norm, dtype=dtype)
    check(problem, backend, mini_batch_size=16, reverse_heads=1)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in BACKENDS for d in LOW_DTYPES if (b, d) != ("cpu", torch.float16)],
)
def test_dtypes_of_results(backend, dtype):
    results = solve(make_problem(dtype=dtype), backend=backend, mini_batch_size=4)
    assert results["o"].dtype == results["grad q"].dtype == dtype
    assert results["w"].dtype == results["b"].dtype == results["grad w0"].dtype == torch.float32


@pytest.mark.parametrize("backend", KERNELS)
def test_memory_kept_for_backward_is_of_the_order_of_the_inputs(backend):
    """O(B T H d): a hundred mini-batches do not keep a hundred weight matrices."""
    batch, length, heads, dim = 1, 1600, 2, 32
    problem = make_problem(batch, length, heads, dim, 16, dtype=torch.float32)
    kept = {}

    def pack(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ttt_linear(**problem, mini_batch_size=16, backend=backend).sum()
    inputs = sum(x.numel() for x in problem.values())
    assert sum(kept.values()) <= inputs + 1.1 * batch * length * heads * dim


@pytest.mark.parametrize("backend", KERNELS)
def test_frozen_inputs_get_no_gradient(backend):
    problem = make_problem(dtype=exact_dtype(backend))
    problem["w0"].requires_grad_(False)
    ttt_linear(**problem, mini_batch_size=4, backend=backend).sum().backward()
    assert problem["w0"].grad is None
    assert problem["k"].grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [True, False])
def test_state_continues_where_it_stopped(backend, norm):
    """Two calls that hand the state on equal one, where the cut falls between mini-batches."""
    problem = make_problem(length=20, norm=norm, dtype=exact_dtype(backend))
    tolerance = FORWARD[exact_dtype(backend)]
    whole = solve(problem, backend=backend, mini_batch_size=4)
    o, state = [], (problem["w0"], problem["b0"])
    for start, stop in ((0, 8), (8, 20)):
        part = {
            name: x[:, start:stop] if name in ("q", "k", "v", "eta") else x
            for name, x in problem.items()
        }
        part["w0"], part["b0"] = state[:2]
        piece, state = ttt_linear(**part, mini_batch_size=4, backend=backend, return_state=True)
        o.append(piece)
    assert_close(torch.cat(o, dim=1), whole["o"], tolerance)
    assert_close(state[0], whole["w"], tolerance)
    assert_close(state[1], whole["b"], tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_passes_through_from_where_it_is(backend):
    """A NaN token says nothing to the mini-batches before its own, and all to the tokens after."""
    problem = make_problem(1, 12, 2, 16, 4, dtype=exact_dtype(backend))
    problem = {name: x.detach() for name, x in problem.items()}
    problem["v"][0, 5, 0] = float("nan")
    o = ttt_linear(**problem, mini_batch_size=4, backend=backend)
    assert torch.isfinite(o[0, :4]).all()
    assert torch.isfinite(o[0, :, 1]).all()
    assert torch.isnan(o[0, 5:, 0]).all()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu", torch.bfloat16), ("dual", torch.bfloat16), ("dual", torch.float16)],
)
def test_large_activations_do_not_overflow(backend, dtype):
    """Keys of norm ~1000 make products beyond float16's range; with the norm the output is not."""
    problem = make_problem(1, 64, 2, 32, 16, dtype=dtype)
    large = {n: (x * 100 if n in "qkv" else x).detach() for n, x in problem.items()}
    large = {name: x.requires_grad_() for name, x in large.items()}
    results = solve(large, backend=backend, mini_batch_size=16)
    assert all(torch.isfinite(x).all() for name, x in results.items() if name in ("o", "w", "b"))
    assert torch.isfinite(results["grad q"]).all()
