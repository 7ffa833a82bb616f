"""The Triton kernels of gated_norm and swiglu compiled for Hopper (sm_90) without a GPU."""

import re
from importlib import import_module

import pytest
import torch

from vision_ttt.ops._table import TABLE
from vision_ttt.ops.gated_norm import triton_backend as gated_norm_backend

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.compiler import ASTSource  # noqa: E402

from machine_code import check_unspilled, usage_of  # noqa: E402

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def slow(*values):
    """A case of which another one is tested by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Recorder:
    """Stands in for a kernel: compiles it for the arguments and options that it is launched with.

    Tensors on the meta device stand in for those of a GPU; all of them begin at aligned addresses.
    """

    def __init__(self, kernel, directory):
        self.kernel, self.directory = kernel, directory

    def __getitem__(self, grid):
        assert 0 < grid[0] < 2**31
        return self

    def __call__(self, *arguments, **options):
        parameters = self.kernel.params
        plain = {parameter.name for parameter in parameters if parameter.do_not_specialize}
        constants = {p.name: options.pop(p.name) for p in parameters if p.is_constexpr}
        signature, aligned = dict.fromkeys(constants, "constexpr"), {}
        names = [p.name for p in parameters if not p.is_constexpr]
        for index, (name, x) in enumerate(zip(names, arguments, strict=True)):
            signature[name], divisible = describe(x)
            if x is None:
                constants[name] = None
            elif divisible and name not in plain:
                paths = [(index, i) for i in range(len(x))] if isinstance(x, tuple) else [(index,)]
                aligned |= {path: [["tt.divisibility", 16]] for path in paths}
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.usage = usage_of(compiled, self.directory)


def describe(x):
    """A kernel argument's type, and whether 16 divides it: only that is compiled for."""
    if x is None:
        return "constexpr", False
    if torch.is_tensor(x):
        return POINTERS[x.dtype], True
    if isinstance(x, tuple):
        return ("i32",) * len(x), all(n % 16 == 0 for n in x)
    return ("fp32", False) if isinstance(x, float) else ("i32", x % 16 == 0)


def compile_launched(monkeypatch, directory, op, kernel, arguments, grad):
    op, module = TABLE[op], import_module(f"vision_ttt.ops.{op}.triton_kernels")
    recorder = Recorder(getattr(module, f"{kernel}_kernel"), directory)
    inputs, backend = op.inputs(*arguments), op.backends["triton"]
    with monkeypatch.context() as patch:
        patch.setattr(module, f"{kernel}_kernel", recorder)
        backend.forward(inputs) if kernel == "forward" else backend.backward(inputs, grad)
    return recorder.usage


@pytest.fixture
def norm_usage(monkeypatch, tmp_path):
    def usage(kernel, dim, parts=2, gated=True, dtype=torch.bfloat16, padding=0):
        """As Vittt trains: views of fused projections, float32 parameters."""
        wide = torch.empty(8, 1024, 2 * parts * dim + padding, dtype=dtype, device="meta")
        z, gate = wide[..., parts * dim : 2 * parts * dim], wide[..., :dim] if gated else None
        parameter = torch.empty(parts, dim, device="meta")
        arguments = (z, gate, parameter, parameter, 1e-6)
        grad = torch.empty(8, 1024, dim, dtype=dtype, device="meta")
        return compile_launched(monkeypatch, tmp_path, "gated_norm", kernel, arguments, grad)

    return usage


@pytest.fixture
def swiglu_usage(monkeypatch, tmp_path):
    def usage(kernel, hidden, dtype=torch.bfloat16):
        arguments = (torch.empty(8, 1024, 2 * hidden, dtype=dtype, device="meta"),)
        grad = torch.empty(8, 1024, hidden, dtype=dtype, device="meta")
        return compile_launched(monkeypatch, tmp_path, "swiglu", kernel, arguments, grad)

    return usage


def check_by_16_bytes(found):
    """All that moves between memory and registers does."""
    for moved in ("LDG", "STG"):
        every = re.findall(rf"\b{moved}\S*", found.machine_code)
        assert every
        assert all(".128" in instruction for instruction in every), every


@pytest.mark.parametrize("parts", [slow(1), 2])
@pytest.mark.parametrize("dim", [192, slow(384), slow(768)])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_gated_norm(kernel, dim, parts, norm_usage, record_property):
    found = norm_usage(kernel, dim, parts)
    record_property("registers, stack, shared memory", found[:3])
    check_unspilled(found)
    check_by_16_bytes(found)
    if dim <= 512:  # a mean needs no exchange between warps
        assert not re.search(r"\b(BAR|LDS|STS)\b", found.machine_code)


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16)])
def test_gated_norm_of_other_dtypes_and_without_a_gate(dtype, kernel, norm_usage):
    found = norm_usage(kernel, 192, gated=False, dtype=dtype)
    check_unspilled(found)
    check_by_16_bytes(found)


@pytest.mark.parametrize(
    ("parts", "dim", "padding"), [slow(3, 384, 0), (2, 200, 3), slow(2, 2048, 0)]
)
def test_gated_norm_of_other_shapes_and_of_strides_that_16_does_not_divide(
    parts, dim, padding, norm_usage
):
    check_unspilled(norm_usage("backward", dim, parts, padding=padding))


@pytest.mark.parametrize(("parts", "spilled"), [slow(1, 128), (2, 0), slow(8, 0)])
def test_the_widest_tiles(parts, spilled, norm_usage, record_property):
    found = norm_usage("backward", gated_norm_backend.LARGEST_TILE // parts, parts)
    record_property("registers, stack, shared memory", found[:3])
    assert found.stack <= spilled
    assert found.shared <= 48 * 1024


@pytest.mark.parametrize("hidden", [512, slow(192)])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_swiglu(kernel, hidden, swiglu_usage, record_property):
    found = swiglu_usage(kernel, hidden)
    record_property("registers, stack, shared memory", found[:3])
    check_unspilled(found)
    check_by_16_bytes(found)
    assert not re.search(r"\b(BAR|LDS|STS)\b", found.machine_code)
    assert found.registers <= 64  # eight programs share a multiprocessor


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16)])
def test_swiglu_of_other_dtypes(dtype, swiglu_usage):
    check_by_16_bytes(swiglu_usage("backward", 512, dtype))
