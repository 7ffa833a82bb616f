"""Diffusion: how images are noised, what a model learns of it, and how it makes new ones.

Example:
    >>> process = make_process("noise")
    >>> loss = process.losses(model, images, labels, *draw(images)).mean()
    >>> images = sample(model, process, labels, size=(32, 32), guidance=1.5)  # [N, C, 32, 32]
"""

from importlib.util import find_spec

from vision_ttt.errors import UserError


class MissingPackageError(UserError, ImportError):
    """A package of the extra [diffusion] is not installed."""


if find_spec("diffusers") is None:
    raise MissingPackageError(
        "diffusion needs the package diffusers: pip install 'vision-ttt[diffusion]'"
    )

from vision_ttt.diffusion.flow import FlowMatching  # noqa: E402 (it needs diffusers)
from vision_ttt.diffusion.noise import NoisePrediction  # noqa: E402
from vision_ttt.diffusion.process import OBJECTIVES, Process, draw, make_process  # noqa: E402
from vision_ttt.diffusion.sampling import sample  # noqa: E402

__all__ = [
    "make_process",
    "draw",
    "sample",
    "OBJECTIVES",
    "Process",
    "NoisePrediction",
    "FlowMatching",
    "MissingPackageError",
]
