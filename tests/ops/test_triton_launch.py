"""What the Triton backends launch, without a GPU: all but the kernels' run.

The kernels are compiled for Hopper and handed, with the arguments as they come, to a driver that
runs nothing.
"""

import importlib

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.runtime import driver  # noqa: E402

import ttt_linear_problems  # noqa: E402
import ttt_mlp_problems  # noqa: E402
from ttt_linear_problems import NAMES, make_problem  # noqa: E402
from vision_ttt.ops._table import TABLE  # noqa: E402
from vision_ttt.ops.ttt_linear import triton_tuning  # noqa: E402

OP = TABLE["ttt_linear"]
TRITON = OP.backends["triton"]
PROBLEMS = {"ttt_linear": ttt_linear_problems, "ttt_mlp": ttt_mlp_problems}


class Utilities:
    def __init__(self):
        self.loaded = []

    def load_binary(self, name, *_):
        self.loaded.append(name)
        return 1, 1, 200, 0, 1024  # module, function, registers, spills, threads at most

    def get_device_properties(self, _):
        return {"max_shared_mem": 227 * 1024, "max_num_regs": 65536, "warpSize": 32}


class IdleDriver:
    """Stands in for that of a Hopper."""

    def __init__(self):
        self.launches = launches = []
        self.utils = Utilities()

        class Launcher:
            def __init__(self, _source, metadata):
                self.metadata = metadata

            def __call__(self, programs, *_):
                metadata = self.metadata
                launches.append((metadata.name, programs, metadata.num_warps, metadata.maxnreg))

        self.launcher_cls = Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_device_interface(self):
        return torch.cuda

    def get_benchmarker(self):
        def run_once(function, **_):
            function()
            return [1.0, 1.0, 1.0]

        return run_once


@pytest.fixture
def idle(monkeypatch):
    idle = IdleDriver()
    monkeypatch.setattr(driver, "_active", idle)  # set_active could not be undone without a GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return idle


def make_inputs(batch, length, heads):
    problem = make_problem(batch, length, heads, 64, 16, scale="per head", dtype=torch.bfloat16)
    return [problem[name].detach() for name in NAMES]


def test_ttt_linear(idle, monkeypatch):
    monkeypatch.setattr(triton_tuning, "_crowds", lambda *_: False)
    inputs = make_inputs(2, 608, 4)  # 16 divides it, not the other length below
    inputs = OP.inputs(*inputs, 16, 2, 1e-6)
    *results, kept_w, kept_b = TRITON.forward(inputs, True)
    assert set(idle.launches) == {("forward_kernel", 8, 4, None), ("forward_kernel", 8, 8, None)}
    idle.launches.clear()
    grads = [torch.zeros_like(x) for x in results]
    TRITON.backward(inputs, *grads, kept_w, kept_b)
    segments = kept_w.shape[0] + 1
    assert segments == 3
    programs = {"segments_kernel": 8 * segments, "scan_kernel": 8}
    wanted = {(name, n, warps, None) for name, n in programs.items() for warps in (4, 8)}
    assert set(idle.launches) == wanted

    # Nothing is compiled anew for other batches, lengths or numbers of heads.
    loaded = len(idle.utils.loaded)
    inputs = make_inputs(3, 555, 6)
    inputs = OP.inputs(*inputs, 16, 1, 1e-6)
    *results, kept_w, kept_b = TRITON.forward(inputs, True)
    grads = [torch.zeros_like(x) for x in results]
    TRITON.backward(inputs, *grads, kept_w, kept_b)
    assert len(idle.utils.loaded) == loaded


def test_ttt_linear_with_mini_batches_of_several_tiles(idle, monkeypatch):
    """One version for every such size, and for every other length, batch and number of heads."""
    monkeypatch.setattr(triton_tuning, "_crowds", lambda *_: False)
    loaded = set()
    for size, shape in ((64, (2, 608, 4)), (20, (3, 555, 6)), (100, (1, 600, 2))):
        inputs = [*make_inputs(*shape)[:-1], torch.ones(shape[2], size)]
        inputs = OP.inputs(*inputs, size, 2, 1e-6)
        *results, kept_w, kept_b = TRITON.forward(inputs, True)
        grads = [torch.zeros_like(x) for x in results]
        TRITON.backward(inputs, *grads, kept_w, kept_b)
        loaded.add(len(idle.utils.loaded))
    assert {warps for _, _, warps, _ in idle.launches} == {8}
    assert loaded == {3}


def test_ttt_linear_where_programs_crowd(idle, monkeypatch):
    monkeypatch.setattr(triton_tuning, "_crowds", lambda *_: True)
    TRITON.forward(OP.inputs(*make_inputs(2, 50, 4), 16, 2, 1e-6), False)
    assert {launch[2:] for launch in idle.launches} == {(4, None), (4, 168), (8, None)}


@pytest.mark.slow
def test_ttt_mlp(idle):
    """One version of each kernel for every length, batch, number of heads and of several tiles."""
    op, loaded = TABLE["ttt_mlp"], set()
    for size, (batch, length, heads) in ((20, (2, 608, 4)), (40, (3, 555, 6))):
        problem = ttt_mlp_problems.make_problem(
            batch, length, heads, 16, size, dtype=torch.bfloat16
        )
        inputs = op.inputs(*(x.detach() for x in problem.values()), size, 2, 1e-6)
        idle.launches.clear()
        *results, k1, k2, k3, k4 = op.backends["triton"].forward(inputs, True)
        grads = [torch.zeros_like(x) for x in results]
        op.backends["triton"].backward(inputs, *grads, k1, k2, k3, k4)
        programs = batch * heads
        wanted = [("forward_kernel", n) for n in (programs, programs * (1 + len(k1)))]
        assert [launch[:2] for launch in idle.launches] == [*wanted, ("scan_kernel", programs)]
        loaded.add(len(idle.utils.loaded))
    assert loaded == {3}


@pytest.mark.parametrize(("op", "problems"), PROBLEMS.items())
def test_a_part_of_a_mini_batch(op, problems, idle):
    """Nothing is compiled anew for another place or number of tokens; a tile is one launch."""
    loaded = set()
    part = importlib.import_module(f"vision_ttt.ops.{op}.op").PART
    for position, tokens in ((1, 1), (3, 2), (16, 16), (2, 40), (1, 23)):
        problem = problems.make_problem(2, tokens, 3, 16, 64, dtype=torch.bfloat16)
        given = [x.detach() for x in problem.values()]
        state = [x.expand(2, *x.shape).contiguous() for x in given[4:-3]]
        sums = [torch.zeros_like(x) for x in state]
        inputs = (*given[:4], *state, *given[-3:], *sums, None, position, 64, 1e-6, True)
        idle.launches.clear()
        part.backends["triton"].forward(part.inputs(*inputs))
        assert [launch[:2] for launch in idle.launches] == [("part_kernel", 6)] * -(-tokens // 16)
        loaded.add(len(idle.utils.loaded))
    assert loaded == {1, 2}  # that of a last tile, and of one before it, which has no last state


X = torch.randn(2, 35, 64, dtype=torch.bfloat16)
CONV1D, CONV2D, NORM = torch.randn(64, 1, 4), torch.randn(64, 1, 3, 3), torch.randn(2, 64)


@pytest.mark.parametrize(
    ("op", "arguments", "grad", "programs"),
    [
        ("directional_conv1d", (X, CONV1D, NORM[0], 32), X, (4, 4)),
        ("depthwise_conv2d", (X, CONV2D, 5, 7), X, (2, 2)),
        ("gated_norm", (torch.cat([X, X], -1), X, NORM, NORM, 1e-6), X, (9, 5)),
        ("swiglu", (X,), X[..., :32], (2, 2)),
    ],
)
def test_around_it(op, arguments, grad, programs, idle):
    op = TABLE[op]
    inputs, triton = op.inputs(*arguments), op.backends["triton"]
    for launch, wanted in zip(
        (lambda: triton.forward(inputs), lambda: triton.backward(inputs, grad)),
        programs,
        strict=True,
    ):
        idle.launches.clear()
        launch()
        assert [launch[1] for launch in idle.launches] == [wanted]
        loaded = len(idle.utils.loaded)
        launch()
        assert len(idle.utils.loaded) == loaded
