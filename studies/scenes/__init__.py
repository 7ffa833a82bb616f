"""Backbones compared on the rendered scenes: same adapter, heads, data and number of updates."""

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "vittt": {},
    # Of the same width, depth, heads and patches as Vittt-nano.
    "deit": {
        "model.name": "deit_tiny_patch16_224",
        "model.arguments": {"embed_dim": 96, "depth": 4, "num_heads": 3},
    },
}
"""Name → what it changes in the recipes of `vision-ttt demo-dense`."""
