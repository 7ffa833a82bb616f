"""The rows of Mamba-Reg's Tables 4 and 6: keywords of MambaReg, and top-1 of Mamba-Reg-B."""

from __future__ import annotations

from typing import Any

from vision_ttt.models.vittt_ablations import Ablation


def _row(table: int, accuracy: float, **keywords: Any) -> Ablation:
    return Ablation(f"Table {table}", keywords, accuracy=accuracy)


ABLATIONS: dict[str, Ablation] = {
    "front_r1": _row(4, 81.3, distribution="front", global_pool="first"),
    "front_mean": _row(4, 81.4, distribution="front", global_pool="head"),
    "front": _row(4, 82.1, distribution="front"),
    "middle_r1": _row(4, 81.8, distribution="middle", global_pool="first"),
    "middle_mean": _row(4, 82.0, distribution="middle", global_pool="middle"),
    "middle": _row(4, 82.6, distribution="middle"),
    "r1": _row(4, 81.7, global_pool="first"),
    "mean": _row(4, 82.2, global_pool="even"),
    "n1": _row(6, 81.8, num_registers=1, head_reduction=1),
    "n1_wide": _row(6, 82.0, num_registers=1, head_reduction=1 / 3),
    "n3": _row(6, 82.8, num_registers=3, head_reduction=1),
    "n6": _row(6, 82.8, num_registers=6, head_reduction=2),
    "n24": _row(6, 82.6, num_registers=24, head_reduction=4),
}
"""The rows other than Mamba-Reg-B itself (evenly, all concatenated, n = 12, r = 4).

``--arguments.num_registers`` and ``--arguments.head_reduction`` set n and r apart from each other.
"""
