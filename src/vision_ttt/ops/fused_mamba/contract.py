"""The contracts of fused_mamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from vision_ttt.ops._contract import Contract


class Inputs(NamedTuple):
    """The op's arguments. The public function accepts some of them in pairs."""

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A: Tensor
    D: Tensor

    def inner(self) -> int:
        """E, the channels of a direction."""
        return self.x_proj.shape[2]

    def widths(self) -> tuple[int, int, int]:
        """Columns of r, B and C in ``x_proj``: R, N and N."""
        return self.dt_proj.shape[2], self.A.shape[1], self.A.shape[1]


def _check_columns(op: str, values: Mapping[str, Any]) -> None:
    """Raise an error unless x_proj has the columns of r, B and C."""
    columns = values["dt_proj"].shape[2] + 2 * values["A"].shape[1]
    if values["x_proj"].shape[1] != columns:
        raise ValueError(
            f"{op}: x_proj must have R + 2 N = {columns} rows per direction, "
            f"got {list(values['x_proj'].shape)}"
        )


CONTRACT = Contract(
    "fused_mamba",
    {
        "projected": "B T 2*E",
        "conv_weight": "2*E 1 K",
        "conv_bias": "2*E",
        "x_proj": "2 O E",
        "dt_proj": "2 E R",
        "dt_bias": "2*E",
        "A": "2*E N",
        "D": "2*E",
    },
    further=_check_columns,
)
BACKWARD_CONTRACT = CONTRACT.backward(
    {"grad": "B T E"}, {"kept_states": "P B 2*E N"}, may_be_0="BP"
)
