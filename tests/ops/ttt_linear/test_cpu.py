"""The compiled kernels over the cases they serve, against the reference in float64."""

import pytest
import torch

from tolerances import FORWARD, GRADIENT, assert_close
from ttt_linear_problems import as_float64, make_problem, solve
from vision_ttt.ops import _native, ttt_linear

pytestmark = pytest.mark.kernels

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


def check(problem, **options):
    """A result in float32 is that exact whatever the views' dtype."""
    wanted = solve(as_float64(problem), backend="dual", **options)
    got = solve(problem, backend="cpu", **options)
    for name, value in wanted.items():
        table = GRADIENT if name.startswith("grad") else FORWARD
        assert_close(got[name], value, table[got[name].dtype], name)


def test_the_kernels_were_built():
    assert _native.LIBRARY is not None
    assert _native.instruction_set() in _native.INSTRUCTION_SETS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("norm", "scale"),
    [
        (True, "per head"),
        (True, None),
        (False, "shared"),
        pytest.param(True, "shared", marks=pytest.mark.slow),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(False, "per head", marks=pytest.mark.slow),
    ],
)
def test_outputs_states_and_gradients(shape, norm, scale, dtype):
    # The dual form in float64 stands in for the reference, which it is to ten digits.
    for reverse_heads in {shape[2] // 2, shape[2]}:
        problem = make_problem(*shape, norm=norm, scale=scale, dtype=dtype)
        check(problem, mini_batch_size=shape[-1], reverse_heads=reverse_heads)


def test_a_long_sequence():
    problem = make_problem(1, 6400, 2, 64, 16, dtype=torch.float32)
    check(problem, mini_batch_size=16, reverse_heads=1)


def test_a_forked_worker_computes():
    """As in a DataLoader: the parent has used its threads, the child runs on one."""
    problem = {n: x.detach() for n, x in make_problem(1, 40, 2, 16, 4, dtype=torch.float32).items()}
    wanted = ttt_linear(**problem, mini_batch_size=4)

    class Outputs(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return ttt_linear(**problem, mini_batch_size=4)

    options = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 60}
    loader = torch.utils.data.DataLoader(Outputs(), batch_size=None, **options)
    assert all(torch.equal(o, wanted) for o in loader)
