"""Vision backbones whose cost grows linearly with the number of image tokens, by TTT.

Importing this package registers its models with timm, and its ops with PyTorch::

    import timm, vision_ttt
    model = timm.create_model("vittt_tiny_patch16_224", num_classes=10)
"""

import importlib
import sys
from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports
from vision_ttt._version import __version__

if TYPE_CHECKING:
    from vision_ttt import dense, models
    from vision_ttt.acceleration import for_inference, for_training, to_plain
    from vision_ttt.freed_memory import keep_freed_memory
    from vision_ttt.layers import TTTMLP, TTTLayer, TTTLinear, VitttBlock, VitttMixer
    from vision_ttt.models import Vittt, linearize
    from vision_ttt.ops import ttt_linear, ttt_mlp, use_backend

__all__ = [
    "__version__",
    "dense",
    "models",
    "for_inference",
    "for_training",
    "to_plain",
    "keep_freed_memory",
    "linearize",
    "ttt_linear",
    "ttt_mlp",
    "use_backend",
    "TTTLayer",
    "TTTLinear",
    "TTTMLP",
    "VitttBlock",
    "VitttMixer",
    "Vittt",
]

lazy_exports(
    __name__,
    {
        "for_inference": "acceleration",
        "for_training": "acceleration",
        "to_plain": "acceleration",
        "keep_freed_memory": "freed_memory",
        "linearize": "models",
        "ttt_linear": "ops",
        "ttt_mlp": "ops",
        "use_backend": "ops",
        "TTTLayer": "layers",
        "TTTLinear": "layers",
        "TTTMLP": "layers",
        "VitttBlock": "layers",
        "VitttMixer": "layers",
        "Vittt": "models",
    },
    submodules=(
        "bench",
        "convert",
        "data",
        "dense",
        "diffusion",
        "engine",
        "explain",
        "export",
        "inner",
        "language",
        "layers",
        "models",
        "ops",
        "recipes",
        "tasks",
        "whole",
    ),
)


def _is_the_command() -> bool:
    """Return whether this process is the command `vision-ttt`, or `python -m vision_ttt`."""
    if "vision_ttt_command" in sys.modules:
        return True
    # While Python looks for the module of -m, and imports its packages, it stands for argv[0].
    argv = getattr(sys, "argv", [])
    return argv[:1] == ["-m"] and sys.orig_argv[-len(argv)] == __name__


# The command explains itself and refuses wrong arguments before PyTorch is imported, which takes
# seconds: its modules import what they need themselves. For everyone else timm's registry holds the
# models, and PyTorch has the ops of exported programs, the packed blocks' among them.
if not _is_the_command():
    for _name in ("acceleration", "models"):
        importlib.import_module(f"{__name__}.{_name}")
