"""The rows of TTT's Table 1, from linear attention to TTT-Linear: arguments of `ttt` models."""

from __future__ import annotations

from typing import Any, NamedTuple

_PILE_CONTEXT = 2048  # batch gradient descent has one mini-batch of the whole context
_PARTS = ("use_gate", "share_qk", "pre_conv")
"""Of the Mamba backbone."""


class Row(NamedTuple):
    """A row: its arguments, and the published perplexity of 125M parameters on the Pile."""

    keywords: dict[str, Any]
    perplexity: float | None = None


def _rows() -> dict[str, Row]:
    keywords: dict[str, Any] = {
        **dict.fromkeys(("learnable_w0", "inner_norm", "learnable_eta", *_PARTS), False),
        "mini_batch_size": _PILE_CONTEXT,
    }
    rows = {}
    for name, step, perplexity in (
        ("linear_attention", {"ttt_layer_type": "normalised_linear_attention"}, 15.91),
        ("linear_attention_improved", {"ttt_layer_type": "linear_attention"}, 15.23),
        ("ttt_equivalence", {"ttt_layer_type": "linear"}, 15.23),
        ("learnable_w0", {"learnable_w0": True}, 15.27),
        ("ln_residual", {"inner_norm": True}, 14.05),
        ("mini_batch", {"mini_batch_size": 16}, 12.35),
        ("learnable_eta", {"learnable_eta": True}, 11.99),
    ):
        keywords = {**keywords, **step}
        rows[name] = Row(keywords, perplexity)
    # The published last step has all parts at once.
    rows |= {part: Row({**keywords, part: True}) for part in _PARTS}
    return rows | {"mamba_backbone": Row({**keywords, **dict.fromkeys(_PARTS, True)}, 11.09)}


ABLATIONS = _rows()
"""Each row adds a step to the row before, except the rows with one part of the backbone."""
