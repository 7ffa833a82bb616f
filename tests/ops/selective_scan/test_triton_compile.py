"""The launches of selective_scan's Triton kernels, compiled for Hopper (sm_90) without a GPU."""

from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.compiler import ASTSource  # noqa: E402

from machine_code import check_unspilled, usage_of  # noqa: E402
from vision_ttt.ops._table import TABLE  # noqa: E402
from vision_ttt.ops.selective_scan import triton_backend  # noqa: E402

PACKAGE = "vision_ttt.ops.selective_scan"
SHARED_MEMORY = 227 * 1024
OP = TABLE["selective_scan"]
TRITON = OP.backends["triton"]
KERNELS = {
    "forward": ("triton_forward", "forward_kernel"),
    "backward": ("triton_backward", "backward_kernel"),
    "shares": ("triton_segments", "shares_kernel"),
    "shares of gradients": ("triton_segments", "shares_kernel"),
    "carry": ("triton_segments", "carry_kernel"),
}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def slow(*values):
    """A case of which another one is tested by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Recorder:
    """Stands in for a kernel: keeps what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((grid, arguments, options))


def problem(dtype=torch.bfloat16, length=640, channels=384, n=16, groups=0, plain=False):
    """Both directions; every tensor given, or only those that must be."""
    rows = (1, length, groups, n) if groups else (1, length, n)
    tokens, rows = torch.zeros(1, length, channels, dtype=dtype), torch.zeros(rows, dtype=dtype)
    parameter, state = torch.zeros(channels), torch.zeros(1, channels, n)
    optional = [None] * 4 if plain else [parameter, tokens, parameter, state]
    return OP.inputs(tokens, tokens, state[0], rows, rows, *optional, not plain, channels // 2)


def launched(inputs, kernel, monkeypatch):
    """The grid, arguments and options of the kernel's launch in one of both passes on an H100."""
    recorders = {}
    for module, name in set(KERNELS.values()):
        recorders[name] = Recorder()
        monkeypatch.setattr(import_module(f"{PACKAGE}.{module}"), name, recorders[name])
    monkeypatch.setattr(triton_backend, "_processors", lambda x: 132)
    y, state, kept = TRITON.forward(inputs, True)
    if "backward" in kernel or "gradients" in kernel:
        for recorder in recorders.values():
            recorder.launches.clear()
        TRITON.backward(inputs, y, state, kept)
    (launch,) = recorders[KERNELS[kernel][1]].launches
    return launch


def is_constant(parameter, value):
    """Whether the compiler is told the value, as when Triton launches the kernel."""
    specialised = not torch.is_tensor(value) and not parameter.do_not_specialize
    return parameter.is_constexpr or value is None or (specialised and value == 1)


def usage(kernel, inputs, monkeypatch, directory):
    """What ptxas made of the kernel for its launch on these inputs."""
    module, name = KERNELS[kernel]
    jitted = getattr(import_module(f"{PACKAGE}.{module}"), name)
    _, arguments, options = launched(inputs, kernel, monkeypatch)
    given = dict(zip(jitted.arg_names, arguments, strict=False))
    given |= {name: options.pop(name) for name in jitted.arg_names if name in options}
    assert list(given) == jitted.arg_names
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(jitted.params):
        name, value = parameter.name, given[parameter.name]
        if isinstance(value, tuple):
            signature[name] = ("i32",) * len(value)
            places = [(index, axis) for axis, size in enumerate(value) if size % 16 == 0]
        elif is_constant(parameter, value):
            signature[name], constants[name], places = "constexpr", value, []
        else:
            signature[name] = POINTERS[value.dtype] if torch.is_tensor(value) else "i32"
            number = value.data_ptr() if torch.is_tensor(value) else value
            places = [(index,)] * (number % 16 == 0 and not parameter.do_not_specialize)
        aligned |= {place: [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return usage_of(compiled, directory)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            slow(options)
            for options in (
                {"dtype": torch.float32},
                {"dtype": torch.float16},
                {"groups": 2},
                {"plain": True},
                {"plain": True, "dtype": torch.float32},
                {"n": 8},
                {"n": 1},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills(kernel, options, monkeypatch, tmp_path, record_property):
    found = usage(kernel, problem(**options), monkeypatch, tmp_path)
    record_property("registers, stack, shared memory", found[:3])
    check_unspilled(found)
    assert found.shared <= SHARED_MEMORY


def test_a_token_s_outputs_take_few_exchanges_between_threads(monkeypatch, tmp_path):
    """A thread has four numbers n of four channels: two shuffles for each of its four sums."""
    found = usage("forward", problem(), monkeypatch, tmp_path)
    assert found.machine_code.count("SHFL") == 8
    assert found.machine_code.count("MUFU.EX2") <= 16 + 2  # δ and the gate once per channel


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"n": 5, "channels": 30}, {"n": 64}, {"n": 256, "channels": 48}], ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_size_compiles(kernel, options, monkeypatch, tmp_path, record_property):
    found = usage(kernel, problem(**options), monkeypatch, tmp_path)
    record_property("registers, stack, shared memory", found[:3])
    assert found.shared <= SHARED_MEMORY
    assert found.stack <= 128  # bytes, where N is no power of 2 or above 16; 72 by Triton 3.8


def test_segments_fill_a_gpu_that_few_channels_would_leave_idle(monkeypatch):
    """Twelve blocks of channels, 100 chunks: as many programs as an H100 runs at a time."""
    for length, segments in ((6400, 50), (150, 3), (128, 1)):
        for kernel in ("forward", "backward"):
            grid, *_ = launched(problem(length=length), kernel, monkeypatch)
            assert grid == (1, 12, segments)
    # A hundred images are enough as they are.
    of_images = {"u", "delta", "B", "C", "z", "initial_state"}
    given = problem(length=150)._asdict()
    many = {k: x.expand(100, *x.shape[1:]) if k in of_images else x for k, x in given.items()}
    grid, *_ = launched(OP.inputs(**many), "backward", monkeypatch)
    assert grid == (100, 12, 1)
