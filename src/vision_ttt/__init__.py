"""Vision backbones whose cost grows linearly with the number of image tokens, by TTT.

Importing this package registers its models with timm::

    import timm, vision_ttt
    model = timm.create_model("vittt_tiny_patch16_224", num_classes=10)
"""

from vision_ttt import models
from vision_ttt._version import __version__
from vision_ttt.layers import TTTMLP, TTTLayer, TTTLinear, VitttBlock, VitttMixer
from vision_ttt.models import Vittt
from vision_ttt.ops import ttt_linear, ttt_mlp, use_backend

__all__ = [
    "__version__",
    "models",
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
