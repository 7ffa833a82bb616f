"""One of two processes that divide models by a plan, and compare them with the whole ones.

    python divided_models.py RANK MEETING PLAN

MEETING is a file by which the processes find each other, PLAN a file of Python that defines
`tensor_parallel_plan`.
"""

import runpy
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tolerances import FORWARD, GRADIENT, assert_close
from vision_ttt.language import TTTConfig, TTTModel
from vision_ttt.models import DiT3, create_model

IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32).sin()
WORDS = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
DENOISER = {"input_size": 8, "hidden_size": 32, "depth": 1, "num_heads": 2, "in_channels": 3}


def classifier(name: str, **options: object) -> tuple[nn.Module, tuple]:
    return create_model(name, num_classes=10, **options), (IMAGES,)


def stages() -> tuple[nn.Module, tuple]:
    sizes = {"dims": (32, 64), "depths": (1, 1), "num_heads": (2, 2), "img_size": 32}
    return classifier("hvit3_tiny", **sizes)


def words() -> tuple[nn.Module, tuple]:
    return TTTModel(TTTConfig(**WORDS)), (torch.arange(40).reshape(2, 20),)


def denoiser() -> tuple[nn.Module, tuple]:
    return DiT3(**DENOISER), (IMAGES[..., :8, :8], torch.tensor([3, 500]), torch.tensor([1, 2]))


MODELS = {
    "vittt": lambda: classifier("vittt_nano_patch4_32", depth=1),
    "mambar": lambda: classifier("mambar_nano_patch4_32", depth=1),
    "vit3": lambda: classifier("vit3_nano_patch4_32", depth=1),
    "hvit3": stages,
    "dit3": denoiser,
    "ttt_lm": words,
}


def made(name: str) -> tuple[nn.Module, tuple]:
    """The model in which every parameter affects the output, and its arguments."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval(), arguments


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(name: str, divide: Callable[[nn.Module], object]) -> None:
    """Compare outputs and gradients of a model with those of the same model divided."""
    results = []
    for model, arguments in (made(name), made(name)):
        if results:
            divide(model)
            assert any(isinstance(x, DTensor) for x in model.parameters()), name
        output = model(*arguments)
        output = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        output.square().sum().backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        results.append((output, gradients))
    (wanted, gradients), (got, divided) = results
    assert_close(got, wanted, FORWARD[torch.float32], name)
    assert divided.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert_close(whole(divided[key]), gradient, GRADIENT[torch.float32], f"{name}: {key}")


def check_refusal(mesh: DeviceMesh) -> None:
    """A process with the gates, and one with the values, must not pass for a smaller layer."""
    model, arguments = made("vittt")
    plan = {"blocks.*.mlp.fc1": ColwiseParallel(), "blocks.*.mlp.fc2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    try:
        model(*arguments)
    except ValueError as error:
        assert "fc1 returned 256 channels; 512 are required" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("a divided fc1 was accepted")


if __name__ == "__main__":
    rank, meeting, plan_file = sys.argv[1:]
    torch.set_num_threads(1)
    init_process_group("gloo", f"file://{meeting}", rank=int(rank), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plan = runpy.run_path(plan_file, {"torch": torch})["tensor_parallel_plan"]
    for name in MODELS:
        check(name, lambda model: parallelize_module(model, mesh, plan(model)))
    check_refusal(mesh)
    destroy_process_group()
