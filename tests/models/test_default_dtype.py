"""PyTorch's default dtype and device affect the construction of models, never a forward pass."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import timm
import torch

import vision_ttt
from vision_ttt.layers import TTTMLP, TTTLinear, VitttBlock, VitttMixer

OTHERS = [torch.bfloat16, torch.float64]
SMALL = {"img_size": 16, "num_classes": 5}


def image_model(name, **options):
    return lambda: (timm.create_model(name, **SMALL, **options), (torch.randn(2, 3, 16, 16),))


def block():
    mixer = VitttMixer(64, ttt=TTTLinear(64, 2, bidirectional=True, conv_kernel_size=4))
    return VitttBlock(mixer, 64, 48), (torch.randn(2, 12, 64), (3, 4))


ZOO = {
    "vittt": image_model("vittt_nano_patch4_32", depth=1),
    "vittt, mlp": image_model("vittt_nano_patch4_32", depth=1, inner_model="mlp"),
    "vittt, odd mini-batch": image_model("vittt_nano_patch4_32", depth=1, mini_batch_size=5),
    "vit3": image_model("vit3_tiny_patch16_224", depth=1, patch_size=4),
    "vim": image_model("vim_nano_patch4_32", depth=1),
    "mambar": image_model("mambar_nano_patch4_32", depth=1, head_reduction=2),
    "block": block,
    "ttt_linear": lambda: (TTTLinear(64, 2), (torch.randn(2, 20, 64),)),
    "ttt_mlp": lambda: (TTTMLP(64, 2), (torch.randn(2, 20, 64),)),
}
LARGE = {"hvit3": image_model("hvit3_tiny", depths=(1, 1, 1, 1))}
EVERY = [*ZOO, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def outputs_and_gradients(model, inputs):
    """In inference and in training."""
    model.eval()
    with torch.no_grad():
        outputs = [model(*inputs)]
    outputs.append(model(*inputs))
    gradients = torch.autograd.grad(outputs[1].float().square().sum(), list(model.parameters()),
                                    allow_unused=True, materialize_grads=True)  # fmt: skip
    return [*outputs, *gradients]


@pytest.mark.parametrize("name", EVERY)
def test_a_float32_model_gives_the_same_bits_under_any_default(name):
    torch.manual_seed(0)
    model, inputs = (ZOO | LARGE)[name]()
    wanted = outputs_and_gradients(model, inputs)
    for dtype in OTHERS:
        with default_dtype(dtype):
            got = outputs_and_gradients(model, inputs)
        assert all(map(torch.equal, got, wanted)), dtype
    with torch.device("meta"):
        got = outputs_and_gradients(model, inputs)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_a_model_made_under_another_default_computes_in_it(name, dtype):
    torch.manual_seed(0)
    with default_dtype(dtype):
        model, inputs = (ZOO | LARGE)[name]()
        got = outputs_and_gradients(model, inputs)
    for x in got:
        assert x.dtype == dtype
        assert x.isfinite().all()
    # Its numbers are those of the same model in float64.
    inputs = [x.double() if isinstance(x, torch.Tensor) else x for x in inputs]
    exact = outputs_and_gradients(model.double(), inputs)
    tolerance = {torch.bfloat16: 0.1, torch.float64: 1e-10}[dtype]
    for x, y in zip(got[:2], exact[:2], strict=True):
        assert (x.double() - y).abs().max() <= tolerance * y.abs().max()


def test_every_buffer_names_its_dtype_and_device():
    """Without them, a factory call in a forward pass would use PyTorch's defaults."""
    factories = {"empty", "zeros", "ones", "full", "arange", "linspace", "tensor", "eye", "rand"}
    factories |= {"randn", "scalar_tensor", "logspace", "tril_indices"}
    source = Path(vision_ttt.__file__).parent
    offenders = []
    for path in [p for part in ("ops", "layers") for p in (source / part).rglob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                continue  # parameters are made in the default dtype, as all of PyTorch's
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                    continue
                owner = call.func.value
                if not (isinstance(owner, ast.Name) and owner.id == "torch"):
                    continue
                named = {keyword.arg for keyword in call.keywords}
                wanted = {"device"} if call.func.attr == "arange" else {"dtype", "device"}
                if call.func.attr in factories and not wanted <= named:
                    offenders.append(f"{path.relative_to(source)}:{call.lineno}")
    assert not offenders
