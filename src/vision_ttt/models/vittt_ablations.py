"""Every ablation of Vision-TTT's Tables 3 and 4 and Fig. 7 as a registered name: keywords of Vittt.

The keywords work on every size, e.g. ``timm.create_model("vittt_nano_patch4_32", design="dual")``;
the names below are the paper's, on Vittt-T.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from vision_ttt.models.family import Family
from vision_ttt.models.vittt import MODELS, Vittt


class Ablation(NamedTuple):
    """One row of the paper: its table or figure, its keywords, and the figures reported."""

    source: str
    keywords: dict[str, Any]
    parameters: str | None = None
    macs: str | None = None
    accuracy: float | None = None


ABLATIONS: dict[str, Ablation] = {
    "ttt_layer": Ablation("Table 3", {"design": "ttt_layer"}, "5.87M", "1.14G", 74.2),
    "shared_qk": Ablation("Table 3", {"design": "shared_qk"}, "5.43M", "1.07G", 74.0),
    "gating": Ablation("Table 3", {"design": "gating"}, "5.89M", "1.15G", 75.2),
    "conv1d": Ablation("Table 3", {"design": "conv1d"}, "5.90M", "1.16G", 75.6),
    "dual": Ablation("Table 3", {"design": "dual"}, "6.96M", "1.42G", 77.5),
    "head_token": Ablation("Table 4", {"global_pool": "head"}, "6.98M", "1.44G", 76.6),
    "middle_token": Ablation("Table 4", {"global_pool": "middle"}, "6.98M", "1.44G", 76.8),
    "double_token": Ablation("Table 4", {"global_pool": "double"}, "6.98M", "1.45G", 75.4),
    "max_pool": Ablation("Table 4", {"global_pool": "max_norm"}, "6.98M", "1.44G", 77.2),
    **{
        f"b{size}": Ablation("Fig. 7a", {"mini_batch_size": size})
        for size in (4, 8, 32, 64, 128, 196)
    },
    **{f"w{states}": Ablation("Fig. 7b", {"learnable_states": states}) for states in (0, 1)},
}
"""The rows other than Vittt-T itself (last row of Table 3, mean pool, b = 16, two states)."""


def model_name(ablation: str) -> str:
    """The timm name of an ablation of Vittt-T."""
    return f"vittt_tiny_{ablation}_patch16_224"


FAMILY = Family(
    Vittt,
    {
        model_name(row): {**MODELS["vittt_tiny_patch16_224"], **ablation.keywords}
        for row, ablation in ABLATIONS.items()
    },
    __name__,
    fixed=True,
)
default_cfgs = FAMILY.default_cfgs


for _ablation, _row in ABLATIONS.items():
    _name, _keywords = model_name(_ablation), _row.keywords.items()
    _said = f"Vittt-T with {', '.join(f'{key}={value!r}' for key, value in _keywords)}."
    setattr(sys.modules[__name__], _name, FAMILY.entrypoint(_name, _said))
