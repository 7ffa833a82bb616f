"""The launches of selective_scan's Triton kernels, compiled for Hopper (sm_90) without a GPU."""

from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.compiler import ASTSource  # noqa: E402

from machine_code import usage_of  # noqa: E402
from vision_ttt.ops._table import TABLE  # noqa: E402
from vision_ttt.ops.selective_scan import triton_backend  # noqa: E402

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


def problem(dtype=torch.bfloat16, batch=1, length=640, channels=384, n=16, groups=0, plain=False):
    """Both directions; every tensor given, or only those that must be."""
    rows = torch.zeros(batch, length, groups, n) if groups else torch.zeros(batch, length, n)
    tokens, rows = torch.zeros(batch, length, channels, dtype=dtype), rows.to(dtype)
    parameter, state = torch.zeros(channels), torch.zeros(batch, channels, n)
    given = (parameter, tokens, parameter, state)
    options = not plain, channels // 2
    return OP.inputs(
        tokens, tokens, state[0], rows, rows, *(x if not plain else None for x in given), *options
    )


def launched(inputs, kernel, monkeypatch):
    """The grid, arguments and options of the kernel's launch in one of both passes."""
    recorders = {}
    for module, name in set(KERNELS.values()):
        recorders[name] = Recorder()
        monkeypatch.setattr(
            import_module(f"vision_ttt.ops.selective_scan.{module}"), name, recorders[name]
        )
    monkeypatch.setattr(triton_backend, "_processors", lambda x: 132)
    y, state, kept = TRITON.forward(inputs, True)
    if "backward" in kernel or "gradients" in kernel:
        for recorder in recorders.values():
            recorder.launches.clear()
        TRITON.backward(inputs, y, state, kept)
    ((grid, arguments, options),) = recorders[KERNELS[kernel][1]].launches
    return grid, arguments, options


def usage(kernel, inputs, monkeypatch, directory):
    """What ptxas made of the kernel for its launch on these inputs."""
    module, name = KERNELS[kernel]
    jitted = getattr(import_module(f"vision_ttt.ops.selective_scan.{module}"), name)
    _, arguments, options = launched(inputs, kernel, monkeypatch)
    names = jitted.arg_names
    given = dict(zip(names, arguments, strict=False)) | {
        x: options.pop(x) for x in names if x in options
    }
    assert set(given) == set(names)
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(jitted.params):
        value, plain = given[parameter.name], parameter.do_not_specialize
        if isinstance(value, tuple):
            signature[parameter.name] = ("i32",) * len(value)
            aligned |= {
                (index, i): [["tt.divisibility", 16]] for i, x in enumerate(value) if x % 16 == 0
            }
        elif torch.is_tensor(value) or not (
            parameter.is_constexpr or value is None or (value == 1 and not plain)
        ):
            signature[parameter.name] = POINTERS[value.dtype] if torch.is_tensor(value) else "i32"
            if not plain and (value.data_ptr() if torch.is_tensor(value) else value) % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return usage_of(compiled, directory)
