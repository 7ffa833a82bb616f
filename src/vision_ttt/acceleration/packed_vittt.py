"""Vittt blocks on packed weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vision_ttt.acceleration.packed_block import PackedBlock
from vision_ttt.acceleration.supported_parts import (
    UnsupportedPart,
    require,
    require_affine,
    require_linear,
    require_scans,
)
from vision_ttt.layers import (
    TTTMLP,
    DepthwiseConv2d,
    GatedNorm,
    LinearLearner,
    MLPLearner,
    SwiGLU,
    TTTLinear,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.layers.extra_tokens import merge_extra, split_extra
from vision_ttt.layers.grid import check_grid
from vision_ttt.models.block_sequence import BlockSequence
from vision_ttt.models.naflex import NaFlexBatch
from vision_ttt.ops import depthwise_conv2d
from vision_ttt.ops.packed import packed_vittt_blocks
from vision_ttt.ops.packed.block import Place
from vision_ttt.ops.packed.vittt_blocks import BLOCK

LEARNERS = {TTTLinear: LinearLearner, TTTMLP: MLPLearner}
"""The inner learner of each supported sequence layer."""


class PackedVitttBlock(PackedBlock):
    """:class:`vision_ttt.VitttBlock` for evaluation on a CPU: [B, T, D], (h, w) → [B, T, D]."""

    kind = VitttBlock

    def __init__(self, block: VitttBlock, dtype: torch.dtype) -> None:
        require_supported_parts(block)
        dim = block.mixer.ttt.out_proj.in_features
        super().__init__(BLOCK, dtype, dim, sizes_of(block), parameters_of(block))
        self.rate, self.eps = numbers_of(block)

    def forward(self, y: Tensor, grid: tuple[int, int], extra: Sequence[int] = ()) -> Tensor:
        """Run the block; ``extra`` are the positions in T of tokens outside the grid.

        Raises:
            ValueError: T is not h · w + len(extra).
        """
        sizes, weights = self.sizes, self.weights
        if sizes.kernel:
            check_grid(y.shape[1], grid, len(extra))
        if extra and sizes.kernel:
            image, others = split_extra(y, extra)
            y = merge_extra(image + self._convolve(image, grid), others, extra)
            # Without its first tensor the vector holds a block without the Conv2d.
            weights, sizes = weights[self._conv2d.end :], sizes._replace(kernel=0)
        weights = weights.unsqueeze(0)
        return packed_vittt_blocks(y, weights, sizes, grid=grid, rate=self.rate, eps=self.eps)

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because a sequence of blocks that runs as one op would not call the hook.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "packed blocks support no hooks; register the hook on the original block and call "
            "for_inference again, which leaves that block unpacked"
        )

    register_forward_hook = register_forward_pre_hook

    @property
    def _conv2d(self) -> Place:
        return BLOCK.places(self.dim, self.sizes)["conv2d"]

    def _convolve(self, image: Tensor, grid: tuple[int, int]) -> Tensor:
        place, kernel = self._conv2d, self.sizes.kernel
        taps = self.weights[: place.words].view(torch.float32).view(place.shape)
        return depthwise_conv2d(image, taps.t().reshape(-1, 1, kernel, kernel), grid)


class PackedVitttBlocks(BlockSequence):
    """Packed Vittt blocks of equal sizes, which run as one op.

    Args:
        blocks: at least one.

    Raises:
        UnsupportedPart: one is another module, or their sizes differ.
    """

    kind = BlockSequence
    weights: Tensor

    def __init__(self, blocks: BlockSequence) -> None:
        super().__init__(blocks)
        if not all(isinstance(block, PackedVitttBlock) for block in blocks):
            raise UnsupportedPart("it has other blocks")
        numbers = {(block.sizes, block.rate, block.eps) for block in blocks}
        if len(numbers) != 1:
            raise UnsupportedPart("its blocks have different sizes")
        self.sizes, self.rate, self.eps = numbers.pop()
        self.register_buffer("weights", torch.stack([block.weights for block in blocks]))
        self._share_weights()

    def __getstate__(self) -> dict[str, Any]:
        """Omit the blocks' views of the weights: pickle writes the whole storage of each view."""
        bare = {name: copy.copy(block) for name, block in self.named_children()}
        for block in bare.values():
            block._buffers = {}
        return {**self.__dict__, "_modules": bare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_weights()

    def _share_weights(self) -> None:
        """Make each block's weights a view of the stack, which takes no further memory."""
        for block, weights in zip(self, self.weights, strict=True):
            block.register_buffer("weights", weights)

    def forward(
        self,
        x: Tensor,
        *context: Any,
        start: int = 0,
        stop: int | None = None,
        checkpointing: bool = False,
    ) -> Tensor:
        """See :class:`BlockSequence`; without gradients there is nothing to checkpoint."""
        weights = self.weights[start:stop]
        grid, *extra = context = self.context_of(context)
        if isinstance(grid, NaFlexBatch):
            return grid.each(partial(self.forward, start=start, stop=stop), x)
        if not len(weights) or (extra and extra[0] and self.sizes.kernel):
            return super().forward(x, *context, start=start, stop=stop)
        if self.sizes.kernel:
            check_grid(x.shape[1], grid)
        return packed_vittt_blocks(x, weights, self.sizes, grid=grid, rate=self.rate, eps=self.eps)


def require_supported_parts(block: VitttBlock) -> None:
    """Require that a block computes what its class does: own parts, unchanged, without hooks.

    Raises:
        UnsupportedPart: a part is another, or was changed.
    """
    require(block, "it", VitttBlock)
    mixer = block.mixer
    require(mixer, "mixer", VitttMixer)
    ttt, mlp = mixer.ttt, block.mlp
    require(ttt, "mixer.ttt", *LEARNERS)
    require(mlp, "mlp", SwiGLU)
    require(ttt.learner, "mixer.ttt.learner", LEARNERS[type(ttt)])
    require(ttt.merge, "mixer.ttt.merge", GatedNorm)
    if mixer.conv2d is not None:
        require(mixer.conv2d, "mixer.conv2d", DepthwiseConv2d)
    for path in ("mixer.ttt.conv_q", "mixer.ttt.conv_k"):
        conv = block.get_submodule(path)
        if not isinstance(conv, nn.Identity):
            require_scans(conv, path, ttt.widths["k"] - ttt.out_proj.in_features)
    for path in ("mixer.drop_path", "drop_path"):
        require(block.get_submodule(path), path, DropPath, nn.Identity)
    for path in ("mixer.norm", "norm"):
        require_affine(block.get_submodule(path), path)
    for path in ("mixer.ttt.in_proj", "mixer.ttt.out_proj", "mlp.fc1", "mlp.fc2"):
        require_linear(block.get_submodule(path), path, bias=False)
    require_linear(ttt.rate_proj, "mixer.ttt.rate_proj", bias=True)
    if type(ttt.conv_q) is not type(ttt.conv_k):
        raise UnsupportedPart("mixer.ttt convolves one of q and k only")
    if ttt.rotary is not None:
        raise UnsupportedPart("mixer.ttt rotates q and k")
    if ttt.base_learning_rate < 0:
        raise UnsupportedPart(f"mixer.ttt.base_learning_rate is {ttt.base_learning_rate}")


def sizes_of(block: VitttBlock) -> dict[str, int]:
    """The block's sizes by the names that the op gives them, but for ``is_bfloat16``."""
    mixer, ttt = block.mixer, block.mixer.ttt
    return {
        "heads": ttt.heads,
        "directions": ttt.learner.directions,
        "taps": 0 if isinstance(ttt.conv_q, nn.Identity) else ttt.conv_q.kernel_size[0],
        "hidden": block.mlp.fc2.in_features,
        "mini_batch_size": ttt.learner.mini_batch_size,
        "kernel": 0 if mixer.conv2d is None else mixer.conv2d.weight.shape[-1],
        "views": 3 if ttt.widths["q"] else 2,
        "gated": int(ttt.widths["gate"] > 0),
        "is_mlp": int(isinstance(ttt.learner, MLPLearner)),
    }


def numbers_of(block: VitttBlock) -> tuple[float, tuple[float, float, float, float]]:
    """The op's ``rate`` and ``eps``."""
    mixer, ttt = block.mixer, block.mixer.ttt
    # The rate at a logit of +∞ is η_base / d, in TTT-MLP times the warm-up factor.
    rate = ttt.rates(torch.full((), torch.inf, dtype=torch.float32)).item()
    return rate, (mixer.norm.eps, ttt.learner.eps, ttt.merge.eps, block.norm.eps)


def parameters_of(block: VitttBlock) -> dict[str, Tensor | None]:
    """The block's parameters by the names that the op gives them."""
    mixer, ttt, mlp = block.mixer, block.mixer.ttt, block.mlp
    learner, gate = ttt.learner, ttt.widths["gate"]
    views, gates = ttt.in_proj.weight.tensor_split([len(ttt.in_proj.weight) - gate])
    mlp_gate, mlp_value = mlp.fc1.weight.chunk(2)
    convolutions = {
        f"{name}.{part}": x.squeeze(1) if part == "weight" else x
        for name in ("conv_q", "conv_k")
        for part, x in getattr(ttt, name).named_parameters()
    }
    state = zip(("w1", "b1", "w2", "b2"), learner.state(), strict=False)
    return {
        "conv2d": None if mixer.conv2d is None else mixer.conv2d.weight.flatten(1).t(),
        "norm.weight": mixer.norm.weight,
        "norm.bias": mixer.norm.bias,
        "views": views,
        "gate": gates,
        "rates": ttt.rate_proj.weight,
        "rates.bias": ttt.rate_proj.bias,
        **convolutions,
        **{f"initial.{name}": x for name, x in state},
        "inner_weight": learner.norm_weight,
        "inner_bias": learner.norm_bias,
        "scale": learner.position_scale(),
        "post_weight": ttt.merge.weight,
        "post_bias": ttt.merge.bias,
        "out_proj": ttt.out_proj.weight,
        "mlp_norm.weight": block.norm.weight,
        "mlp_norm.bias": block.norm.bias,
        "mlp_gate": mlp_gate,
        "mlp_value": mlp_value,
        "mlp_out": mlp.fc2.weight,
    }
