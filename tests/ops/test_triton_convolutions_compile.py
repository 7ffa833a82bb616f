"""The launches of both convolutions' kernels, compiled for Hopper (sm_90) without a GPU."""

import re
from importlib import import_module

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402  (may be missing, see above)
from triton.compiler import ASTSource  # noqa: E402

from machine_code import check_unspilled, usage_of  # noqa: E402
from vision_ttt.ops._table import TABLE  # noqa: E402

OPS = "vision_ttt.ops"
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def slow(*values):
    """A case of which another one is tested by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Recorder:
    """Stands in for a kernel: keeps what it is launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        self.launched = arguments, options


def directional_conv1d(x, parameters=torch.float32, reverse=None, taps=4):
    channels = x.shape[-1]
    reverse = channels // 2 if reverse is None else reverse
    weight, bias = (torch.zeros(s, dtype=parameters) for s in ((channels, 1, taps), channels))
    return x, weight, bias, reverse


def depthwise_conv2d(x, parameters=torch.float32, size=3):
    weight = torch.zeros(x.shape[-1], 1, size, size, dtype=parameters)
    return x, weight, x.shape[1] // 14, 14


ARGUMENTS = {"directional_conv1d": directional_conv1d, "depthwise_conv2d": depthwise_conv2d}


def machine_code(op, kernel, x, monkeypatch, directory, **options):
    """What a launch on x would run; checked to keep all that a thread needs in its registers."""
    kernels = import_module(f"{OPS}.{op}.triton_kernels")
    jitted, recorder = getattr(kernels, kernel), Recorder()
    monkeypatch.setattr(kernels, kernel, recorder)
    inputs, backend = TABLE[op].inputs(*ARGUMENTS[op](x, **options)), TABLE[op].backends["triton"]
    backend.forward(inputs) if kernel == "forward_kernel" else backend.backward(inputs, x)
    arguments, launch = recorder.launched
    assert len(arguments) == len(jitted.params)
    signature, constants, aligned = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(jitted.params, arguments, strict=True)):
        plain, tensor = parameter.do_not_specialize, torch.is_tensor(value)
        if parameter.is_constexpr or not (tensor or plain or value != 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = POINTERS[value.dtype] if tensor else "i32"
        if not plain and (value.data_ptr() if tensor else value) % 16 == 0:
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=jitted, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)
    found = usage_of(compiled, directory)
    check_unspilled(found)
    return found.machine_code


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("op", ARGUMENTS)
def test_tokens_move_sixteen_bytes_at_a_time(op, kernel, dtype, monkeypatch, tmp_path):
    """A view of a wider projection, whose border between directions is no multiple of a block."""
    x = torch.zeros(2, 196, 576, dtype=dtype)[..., 192:384]
    code = machine_code(op, kernel, x, monkeypatch, tmp_path)
    loads = re.findall(r"\bLDG\S*", code)
    wide = sum("LDG.E.128" in load for load in loads)
    assert wide >= 4
    # Beside them the parameters, a number each: no token is loaded in smaller pieces.
    assert len(loads) - wide <= 8 * 5
    stores = re.findall(r"\bSTG\S*", code)
    assert sum("STG.E.128" in store for store in stores) >= 2


@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(
    ("op", "channels", "options"),
    [
        slow("directional_conv1d", 1, {"reverse": 0, "parameters": torch.float16}),
        ("directional_conv1d", 30, {"reverse": 1, "taps": 7}),
        slow("depthwise_conv2d", 1, {"size": 1}),
        slow("depthwise_conv2d", 30, {"size": 7, "parameters": torch.float16}),
    ],
)
def test_any_size_compiles(op, channels, options, kernel, monkeypatch, tmp_path):
    x = torch.zeros(2, 196, channels, dtype=torch.float16)
    assert "LDG" in machine_code(op, kernel, x, monkeypatch, tmp_path, **options)
