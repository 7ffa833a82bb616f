"""The compiled kernels over the cases they serve, against the reference in float64."""

import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_linear_problems import as_float64, make_problem, solve
from vision_ttt.ops import _native, ttt_linear
from vision_ttt.ops.ttt_linear import autograd

SHAPES = [  # B, T, H, d, b: every dimension, ragged ends, mini-batches from 1 to 64
    (1, 1, 1, 16, 16),
    (2, 15, 2, 16, 16),
    (2, 16, 3, 32, 16),
    (1, 17, 3, 32, 1),
    (2, 196, 2, 64, 16),
    (1, 100, 2, 16, 3),
    (1, 70, 2, 128, 64),
    (2, 33, 2, 32, 50),
    (1, 130, 2, 128, 16),
]


def check(problem, dtype, **options):
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="cpu", **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[dtype], name)


def test_the_kernels_were_built():
    assert _native.LIBRARY is not None
    assert _native.instruction_set() in ("avx512bf16", "avx512", "avx2", "baseline")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [None, "shared", "per head"])
def test_outputs_states_and_gradients(shape, norm, scale, dtype):
    # The dual form in float64 stands in for the reference, which it is to ten digits.
    for reverse_heads in {0, shape[2] // 2, shape[2]}:
        problem = make_problem(*shape, norm=norm, scale=scale, dtype=dtype)
        check(problem, dtype, mini_batch_size=shape[-1], reverse_heads=reverse_heads)


def test_a_long_sequence():
    problem = make_problem(1, 6400, 2, 64, 16, dtype=torch.float32)
    check(problem, torch.float32, mini_batch_size=16, reverse_heads=1)


def test_it_is_what_serves_by_default(monkeypatch):
    runs = []
    kernel = autograd.KERNELS["cpu"]
    counted = kernel._replace(forward=lambda *a: (runs.append(1), kernel.forward(*a))[1])
    monkeypatch.setitem(autograd.KERNELS, "cpu", counted)
    ttt_linear(**make_problem(dtype=torch.float32), mini_batch_size=4)
    ttt_linear(**make_problem(dim=8, dtype=torch.float32), mini_batch_size=4)  # dual's
    ttt_linear(**make_problem(dtype=torch.float64), mini_batch_size=4)  # dual's
    assert len(runs) == 1


def test_the_same_bits_whatever_the_threads():
    problem = make_problem(2, 50, 3, 32, 16, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(solve(problem, backend="cpu", mini_batch_size=16))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_several_python_threads_at_once():
    problem = {n: x.detach() for n, x in make_problem(1, 200, 2, 32, dtype=torch.float32).items()}
    problem["position_scale"] = torch.rand(16)
    wanted = ttt_linear(**problem)
    results = {}

    def work(index):
        for _ in range(5):
            results[index] = ttt_linear(**problem)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], wanted) for index in range(4))


@pytest.mark.parametrize("isa", ["avx2", "baseline"])
def test_lesser_instruction_sets_compute_the_same(isa):
    code = """
import torch
from test_cpu import SHAPES, check
from ttt_linear_problems import make_problem
from vision_ttt.ops import _native
print(_native.instruction_set())
for shape in SHAPES:
    for dtype in (torch.float32, torch.bfloat16):
        problem = make_problem(*shape, dtype=dtype)
        check(problem, dtype, mini_batch_size=shape[-1], reverse_heads=shape[2] // 2)
"""
    folder = os.path.dirname(__file__)
    path = os.pathsep.join([folder, os.path.join(folder, "..", "..")])
    environment = os.environ | {"VISION_TTT_CPU_ISA": isa, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() in (isa, "baseline")


def test_a_forked_worker_computes():
    """As in a DataLoader: the parent has used its threads, the child runs on one."""
    problem = {n: x.detach() for n, x in make_problem(1, 40, 2, 16, 4, dtype=torch.float32).items()}
    wanted = ttt_linear(**problem, mini_batch_size=4)

    class Outputs(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return ttt_linear(**problem, mini_batch_size=4)

    loader = torch.utils.data.DataLoader(Outputs(), num_workers=1, batch_size=None, timeout=60)
    assert all(torch.equal(o, wanted) for o in loader)


def test_without_kernels_the_dual_form_serves_and_one_warning_says_so(monkeypatch):
    monkeypatch.setattr(_native, "LIBRARY", None)
    _native.warn_if_missing.cache_clear()
    problem = make_problem(dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match=r"compiled CPU kernels are not there.*g\+\+"):
        o = ttt_linear(**problem, mini_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ttt_linear(**problem, mini_batch_size=4)
    assert_close(o, ttt_linear(**problem, mini_batch_size=4, backend="dual"), 0.0)
    with pytest.raises(ValueError, match="cannot serve: the compiled kernels are missing"):
        ttt_linear(**problem, mini_batch_size=4, backend="cpu")
    _native.warn_if_missing.cache_clear()
