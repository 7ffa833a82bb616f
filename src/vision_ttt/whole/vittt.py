"""Vittt's block in bands."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vision_ttt.acceleration.packed_vittt import require_supported_parts
from vision_ttt.layers import VitttBlock
from vision_ttt.layers.ttt_layer import OpTTTLayer, TTTLayerState
from vision_ttt.ops import depthwise_conv2d, swiglu
from vision_ttt.whole.bands import BandTokens
from vision_ttt.whole.sweeps import ScanBlock, linear


class BandedVittt(ScanBlock):
    """:class:`vision_ttt.layers.VitttBlock` in bands; each direction is a layer of its own."""

    kind = VitttBlock
    state_kind = TTTLayerState

    def __init__(self, block: VitttBlock, dtype: torch.dtype) -> None:
        require_supported_parts(block)
        mixer, ttt = block.mixer, block.mixer.ttt
        dim = ttt.out_proj.in_features
        self.width, self.directions = dim, ttt.directions
        hidden = block.mlp.fc2.in_features
        self.working_width = 16 * dim + 4 * hidden
        self.conv2d = None if mixer.conv2d is None else mixer.conv2d.weight.detach().float().clone()
        self.halo = 0 if self.conv2d is None else self.conv2d.shape[-1] // 2
        self.norm = copy.deepcopy(mixer.norm).float().requires_grad_(False)
        self.mlp_norm = copy.deepcopy(block.norm).float().requires_grad_(False)
        with torch.random.fork_rng(devices=[]):  # layers draw the weights that are replaced
            self.layers = [_one_direction(ttt, each, dtype) for each in range(ttt.directions)]
        self.combine = copy.deepcopy(ttt.merge).float().requires_grad_(False)
        gate = ttt.widths["gate"]
        self.gate = linear(ttt.in_proj.weight[-gate:], None, dtype) if gate else None
        self.out_proj = linear(ttt.out_proj.weight, None, dtype)
        self.fc1 = linear(block.mlp.fc1.weight, None, dtype)
        self.fc2 = linear(block.mlp.fc2.weight, None, dtype)

    def prepare(self, band: BandTokens) -> Tensor:
        """y + DWConv(y), the class tokens as they are."""
        own = band.own(band.tokens)
        if self.conv2d is not None:
            grid = band.rows, band.width
            own = own + band.own(depthwise_conv2d(band.tokens, self.conv2d, grid))
        return band.sequence(own)

    def scan(
        self, direction: int, x: Tensor, state: TTTLayerState | None
    ) -> tuple[Tensor, TTTLayerState]:
        """The learner's outputs."""
        layer = self.layers[direction]
        (q, k, v, eta, _), taps = layer.views(x, state, True)
        z, learner = layer.learner(q, k, v, eta, None if state is None else state.learner, True)
        return z.flatten(2), TTTLayerState(learner, *taps)

    def merge(self, y: Tensor, x: Tensor, z: Sequence[Tensor]) -> Tensor:
        """Post norms, gate, output projection, MLP."""
        both = z[0] if len(z) == 1 else torch.cat(tuple(z), dim=-1)
        y = y + self.out_proj(self.combine(both, None if self.gate is None else self.gate(x)))
        return y + self.fc2(swiglu(self.fc1(self.mlp_norm(y))))


def _one_direction(ttt: OpTTTLayer, direction: int, dtype: torch.dtype) -> nn.Module:
    """The part of a layer that scans in one direction, as a layer that goes on at any token."""
    learner, dim = ttt.learner, ttt.out_proj.in_features
    heads = ttt.heads // ttt.directions
    part = type(ttt)(
        dim,
        heads,
        mini_batch_size=learner.mini_batch_size,
        share_qk=not ttt.widths["q"],
        conv_kernel_size=ttt.conv_q.kernel_size[0] if ttt.has_conv else 0,
        state_std=0.0,
        inner_norm=learner.norm_weight is not None,
        base_learning_rate=ttt.base_learning_rate,
    )
    channels = slice(direction * dim, (direction + 1) * dim)
    own_heads = slice(direction * heads, (direction + 1) * heads)
    views = ttt.in_proj.weight.split(list(ttt.widths.values()))[:3]
    given = {
        "rate_proj.weight": ttt.rate_proj.weight[own_heads],
        "rate_proj.bias": ttt.rate_proj.bias[own_heads],
        "learner.position_offset": learner.position_offset[direction : direction + 1],
    }
    names = zip(learner.state_names, learner.state(), strict=True)
    given |= {f"learner.{name}": x[own_heads] for name, x in names}
    for name in ("norm_weight", "norm_bias"):
        if (x := getattr(learner, name)) is not None:
            given[f"learner.{name}"] = x[own_heads]
    if ttt.has_conv:
        convs = (("conv_q", ttt.conv_q), ("conv_k", ttt.conv_k))
        for name, conv in convs:
            given |= {f"{name}.{key}": x[channels] for key, x in conv.named_parameters()}
    missing = part.load_state_dict({key: x.detach() for key, x in given.items()}, strict=False)
    # What is not of one direction is not used, and must not be forgotten either.
    assert set(missing.missing_keys) <= {
        "in_proj.weight",
        "out_proj.weight",
        "merge.weight",
        "merge.bias",
    }
    part.learner.eps = learner.eps
    if hasattr(ttt, "warmup"):
        part.warmup.copy_(ttt.warmup)
    part.in_proj = linear(torch.cat([view[channels] for view in views if len(view)]), None, dtype)
    del part.out_proj, part.merge
    return part.eval().requires_grad_(False)
