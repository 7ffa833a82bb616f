"""Vittt's block in bands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vision_ttt.acceleration.packed_vittt import (
    numbers_of,
    parameters_of,
    require_supported_parts,
    sizes_of,
)
from vision_ttt.layers import VitttBlock
from vision_ttt.ops import depthwise_conv2d
from vision_ttt.ops.packed import packed_vittt_band
from vision_ttt.ops.packed.vittt_band import BLOCK, VitttBandSizes, initial_state
from vision_ttt.ops.packed.vittt_blocks import INNER
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import SIDE, TOKENS, BandedBlock, Copy, Sweep


class BandedVittt(BandedBlock):
    """:class:`vision_ttt.layers.VitttBlock` in bands.

    The first sweep runs the scan in the opposite direction to the last sweep, and stores its
    outputs. The last sweep runs the other scan and the rest of the block. A block that scans in
    only one direction runs completely in one sweep. If the last sweep must have the other
    direction, it copies the result.
    """

    kind = VitttBlock

    def __init__(self, block: VitttBlock, dtype: torch.dtype, *, descending: bool) -> None:
        require_supported_parts(block)
        sizes = sizes_of(block)
        self.dim = block.mixer.ttt.out_proj.in_features
        self.rate, self.eps = numbers_of(block)
        conv2d = block.mixer.conv2d
        self.conv2d = None if conv2d is None else conv2d.weight.detach().float().clone()
        self.halo = sizes["kernel"] // 2
        # The outputs of a scan that does not merge have the packed weights' dtype.
        both = sizes["directions"] == 2
        self.side_dtype = dtype if both else torch.float32
        self.side_width = self.dim if both or descending else 0
        self.band_width = sizes["views"] * self.dim + sizes["heads"]
        last = int(descending)
        if both:
            self._sweeps = [
                _Scan(self, block, dtype, sizes, reverse=1 - last, merges=0),
                _Scan(self, block, dtype, sizes, reverse=last, merges=1),
            ]
        else:
            self._sweeps = [_Scan(self, block, dtype, sizes, reverse=0, merges=1)]
        if not both and descending:
            self._sweeps[0].writes = SIDE
            self._sweeps.append(Copy(self, True))

    def sweeps(self) -> Sequence[Sweep]:
        """See :class:`BandedBlock`."""
        return self._sweeps


class _Scan(Sweep):
    def __init__(
        self,
        block: BandedVittt,
        of: VitttBlock,
        dtype: torch.dtype,
        sizes: dict[str, int],
        *,
        reverse: int,
        merges: int,
    ) -> None:
        self.block, self.descending = block, bool(reverse)
        self.writes = TOKENS if merges else SIDE
        self.sizes = VitttBandSizes(
            **{**sizes, "heads": sizes["heads"] // sizes["directions"]},
            **{"is_bfloat16": int(dtype == torch.bfloat16), "reverse": reverse, "merges": merges},
        )
        parameters = _of_direction(parameters_of(of), sizes, block.dim, reverse)
        self.weights = BLOCK.join(parameters, block.dim, self.sizes)
        model = [parameters[f"initial.{name}"] for name in INNER[: 4 if sizes["is_mlp"] else 2]]
        self.initial = initial_state(model, block.dim, self.sizes)

    def run(self, band: BandTokens, state: Tensor | None) -> tuple[Tensor, Tensor]:
        block, sizes, weights = self.block, self.sizes, self.weights
        y, rows = band.tokens, (band.width, band.above, band.below)
        if block.conv2d is None or band.places:
            own = band.own(y)
            if block.conv2d is not None:
                grid = band.rows, band.width
                own = own + band.own(depthwise_conv2d(y, block.conv2d, grid))
                # Without its first tensor the vector holds a block without the Conv2d.
                weights = weights[BLOCK.places(block.dim, sizes)["conv2d"].end :]
                sizes = sizes._replace(kernel=0)
            y = band.sequence(own)
            rows = (y.shape[1], 0, 0)
        count = band.own(band.tokens).shape[1] + len(band.places)
        before = band.length - band.start - count if self.descending else band.start
        return packed_vittt_band(
            *(y, weights, self.initial if state is None else state, band.side, sizes),
            rows=rows,
            open_tokens=before % sizes.mini_batch_size,
            rate=block.rate,
            eps=block.eps,
        )


def _of_direction(
    parameters: dict[str, Tensor | None], sizes: dict[str, int], dim: int, direction: int
) -> dict[str, Tensor | None]:
    """A block's parameters for the scan of one direction."""
    heads = sizes["heads"] // sizes["directions"]
    channels = slice(direction * dim, (direction + 1) * dim)
    own_heads = slice(direction * heads, (direction + 1) * heads)
    views = parameters["views"].split(sizes["directions"] * dim)
    own = {**parameters, "views": torch.cat([view[channels] for view in views])}
    for name, x in parameters.items():
        if x is None:
            continue
        if name.startswith(("rates", "initial", "inner")):
            own[name] = x[own_heads]
        elif name.startswith(("conv_q", "conv_k")):
            own[name] = x[channels]
        elif name.startswith("post"):
            own[name] = x.flip(0) if direction else x
    own["scale"] = parameters["scale"][direction : direction + 1]
    return own
