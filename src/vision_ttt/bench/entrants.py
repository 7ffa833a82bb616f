"""The timed call of a contender: its modules or its deployed model, built and checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision_ttt.bench.contenders import NUM_CLASSES, Contender
from vision_ttt.bench.kernels import ATTENTION, kernels_run
from vision_ttt.bench.protocol import Prepare, Settings, unless_out_of_memory
from vision_ttt.bench.runtimes import Deployed, deploy, find_difference, pack, refusal
from vision_ttt.errors import reason_of
from vision_ttt.freed_memory import keep_freed_memory
from vision_ttt.models.evaluation_mode import evaluation_mode


class Entrant(NamedTuple):
    """A contender at a resolution."""

    prepare: Prepare | None
    """Prepares the call to be timed; None where the contender is not timed."""
    kernels: Sequence[str] = ()
    """Names of the fused kernels that run."""
    failure: str = ""
    """The reason why the contender is not timed, else empty."""


def enter(
    contender: Contender, resolution: int, settings: Settings, train: bool, failure: str
) -> Entrant:
    """Build and check a contender, unless an earlier `failure` excludes it."""
    if failure:
        return Entrant(None, failure=failure)
    if contender.runtime is not None:
        return _enter_deployed(contender, resolution, settings)
    model = _modules(contender, resolution, settings, train)
    kernels, failure = unless_out_of_memory(lambda: _kernels_of(model, resolution, settings, train))
    if failure:
        return Entrant(None, failure=failure)
    if contender.fuses_attention and not any(name.startswith(ATTENTION) for name in kernels):
        return Entrant(None, kernels, "no fused attention kernel supports it")
    return Entrant(_prepare(model, resolution, settings, train), kernels)


def _enter_deployed(contender: Contender, resolution: int, settings: Settings) -> Entrant:
    """Deploy a model and compare its logits with those of the modules."""
    reason = refusal(contender.runtime, settings.dtype)
    if reason is not None:
        return Entrant(None, failure=reason)

    def deploy_and_check() -> tuple[Deployed, str | None, Sequence[str]]:
        deployed, modules, images = _deployed(contender, resolution, settings)
        difference = find_difference(deployed, modules, images, settings.dtype)
        return deployed, difference, _kernels_of_deployed(contender, modules, images, settings)

    try:
        result, failure = unless_out_of_memory(deploy_and_check)
    except Exception as error:
        if contender.runtime == "for_inference":
            raise
        # A failure of another project must not end the measurement.
        return Entrant(None, failure=f"{type(error).__name__}: {reason_of(error)}")
    if failure:
        return Entrant(None, failure=failure)
    deployed, difference, kernels = result
    if difference is not None:
        return Entrant(None, failure=difference)
    return Entrant(_prepare_deployed(deployed, resolution, settings), kernels)


def _deployed(
    contender: Contender, resolution: int, settings: Settings
) -> tuple[Deployed, nn.Module, Tensor]:
    """A deployed model, its modules in float32, and images of the size it was deployed for."""
    modules = contender.build(resolution).eval().requires_grad_(False)
    images = torch.randn(settings.batch_size, 3, resolution, resolution)
    # Some runtimes convert the modules in place.
    own = copy.deepcopy(modules)
    return deploy(contender.runtime, own, images, settings.dtype), modules, images


def _kernels_of_deployed(
    contender: Contender, modules: nn.Module, images: Tensor, settings: Settings
) -> Sequence[str]:
    """The kernels of a packed model on one image. Other runtimes do not report theirs."""
    if contender.runtime != "for_inference":
        return ()
    packed = pack(modules, settings.dtype)
    return kernels_run(lambda: packed(images[:1]))


def _modules(contender: Contender, resolution: int, settings: Settings, train: bool) -> nn.Module:
    """The modules with weights in the dtype for inference, in float32 for training by autocast."""
    model = contender.build(resolution).to(settings.device).train(train)
    return model if train else model.to(settings.dtype)


def build(contender: Contender, resolution: int, settings: Settings, train: bool) -> Prepare:
    """Build a contender again, in a process of its own, and return what prepares its calls."""
    if train and settings.device.type == "cpu":
        keep_freed_memory()
    if contender.runtime is not None:
        deployed, *_ = _deployed(contender, resolution, settings)
        return _prepare_deployed(deployed, resolution, settings)
    return _prepare(_modules(contender, resolution, settings, train), resolution, settings, train)


def _kernels_of(model: nn.Module, resolution: int, settings: Settings, train: bool) -> list[str]:
    """The kernels that the model runs on one image, with gradients enabled in training."""
    dtype = torch.float32 if train else settings.dtype
    image = torch.randn(1, 3, resolution, resolution, device=settings.device, dtype=dtype)
    autocast = _autocast(settings.device, settings.dtype, enabled=train)
    mode = nullcontext() if train else evaluation_mode(model)
    with mode, torch.set_grad_enabled(train), autocast:
        return kernels_run(lambda: model(image))


def _autocast(device: torch.device, dtype: torch.dtype, *, enabled: bool = True) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=enabled and dtype != torch.float32)


def _prepare(model: nn.Module, resolution: int, settings: Settings, train: bool) -> Prepare:
    function = torch.compile(model, dynamic=False) if settings.compiled else model
    shape = (settings.batch_size, 3, resolution, resolution)

    def prepare() -> Callable[[], object]:
        if not train:
            images = torch.randn(shape, device=settings.device, dtype=settings.dtype)
            return functools.partial(_infer, function, images)
        images = torch.randn(shape, device=settings.device)
        labels = torch.randint(NUM_CLASSES, shape[:1], device=settings.device)
        model.zero_grad(set_to_none=True)
        return functools.partial(_step, function, images, labels, settings.dtype)

    return prepare


def _prepare_deployed(deployed: Deployed, resolution: int, settings: Settings) -> Prepare:
    shape = (settings.batch_size, 3, resolution, resolution)
    return lambda: functools.partial(deployed, torch.randn(shape))


@torch.inference_mode()
def _infer(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


def _step(model: nn.Module, images: Tensor, labels: Tensor, dtype: torch.dtype) -> None:
    with _autocast(images.device, dtype):
        loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
