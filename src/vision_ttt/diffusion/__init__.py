"""Diffusion: how images are noised, what a model learns of it, and how it makes new ones.

Example:
    >>> process = make_process("noise")
    >>> loss = process.losses(model, images, labels, *draw(images)).mean()
    >>> images = sample(model, process, labels, size=(32, 32), guidance=1.5)  # [N, C, 32, 32]
"""

from vision_ttt.extras import require

require("diffusion", "diffusion")

from vision_ttt.diffusion.flow import FlowMatching
from vision_ttt.diffusion.noise import NoisePrediction
from vision_ttt.diffusion.process import Process, draw, make_process
from vision_ttt.diffusion.sampling import sample

__all__ = [
    "make_process",
    "draw",
    "sample",
    "Process",
    "NoisePrediction",
    "FlowMatching",
]
