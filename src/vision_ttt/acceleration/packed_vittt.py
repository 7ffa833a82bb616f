"""Vittt blocks on packed weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from timm.layers import DropPath
from torch import Tensor, nn

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
    DirectionalConv1d,
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
from vision_ttt.ops import depthwise_conv2d
from vision_ttt.ops.packed import pack, packed_vittt_blocks
from vision_ttt.ops.packed.vittt_block_weights import (
    VitttBlockParameters,
    VitttBlockSizes,
    join_parameters,
    layout,
    refusal,
    split_parameters,
)

LEARNERS = {TTTLinear: LinearLearner, TTTMLP: MLPLearner}
"""The inner learner of each supported sequence layer."""


class PackedVitttBlock(nn.Module):
    """:class:`vision_ttt.VitttBlock` for evaluation on a CPU: [B, T, D], (h, w) → [B, T, D].

    Args:
        block: the block whose weights are packed; it is not changed.
        dtype: float32 or bfloat16, of the packed weights.

    Raises:
        UnsupportedPart: a part is not of this library, was changed, has a hook, or has a size that
            the kernels do not support.
    """

    kind = VitttBlock

    def __init__(self, block: VitttBlock, dtype: torch.dtype) -> None:
        super().__init__()
        _require_supported_parts(block)
        mixer, ttt, mlp = block.mixer, block.mixer.ttt, block.mlp
        learner = ttt.learner
        dim, hidden = ttt.out_proj.in_features, mlp.fc2.in_features
        reason = refusal(dim, ttt.head_dim, learner.mini_batch_size, hidden)
        if reason:
            raise UnsupportedPart(reason)
        self.dim = dim
        self.sizes = VitttBlockSizes(
            heads=ttt.heads,
            directions=learner.directions,
            taps=0 if isinstance(ttt.conv_q, nn.Identity) else ttt.conv_q.kernel_size[0],
            hidden=hidden,
            mini_batch_size=learner.mini_batch_size,
            kernel=0 if mixer.conv2d is None else mixer.conv2d.weight.shape[-1],
            views=3 if ttt.widths["q"] else 2,
            gated=int(ttt.widths["gate"] > 0),
            is_mlp=int(isinstance(learner, MLPLearner)),
            is_bfloat16=int(dtype == torch.bfloat16),
        )
        # The rate at a logit of +∞ is η_base / d, in TTT-MLP times the warm-up factor.
        self.rate = ttt.rates(torch.full((), torch.inf)).item()
        self.eps = (mixer.norm.eps, learner.eps, ttt.merge.eps, block.norm.eps)
        parameters = _parameters(block, dtype)
        self.register_buffer("weights", join_parameters(parameters, self.sizes))

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
            weights, sizes = weights[layout(self.dim, sizes)[0].end :], sizes._replace(kernel=0)
        weights = weights.unsqueeze(0)
        return packed_vittt_blocks(y, weights, sizes, grid=grid, rate=self.rate, eps=self.eps)

    def register_forward_pre_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: in a sequence of blocks that run as one op the hook would not be called.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "packed blocks have no hooks; register it in the model and call for_inference again: "
            "the block stays as it is there"
        )

    register_forward_hook = register_forward_pre_hook

    def _convolve(self, image: Tensor, grid: tuple[int, int]) -> Tensor:
        conv2d = split_parameters(self.weights, self.dim, self.sizes).conv2d
        kernel = self.sizes.kernel
        return depthwise_conv2d(image, conv2d.t().reshape(-1, 1, kernel, kernel), grid)


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
        """Leave out the blocks' views: pickle writes all that lies behind a view."""
        bare = {name: copy.copy(block) for name, block in self.named_children()}
        for block in bare.values():
            block._buffers = {}
        return {**self.__dict__, "_modules": bare}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_weights()

    def _share_weights(self) -> None:
        """Make the blocks' weights views of all, so that blocks called alone need no memory."""
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
        grid, *extra = context
        if not len(weights) or (extra and extra[0] and self.sizes.kernel):
            return super().forward(x, *context, start=start, stop=stop)
        if self.sizes.kernel:
            check_grid(x.shape[1], grid)
        return packed_vittt_blocks(x, weights, self.sizes, grid=grid, rate=self.rate, eps=self.eps)


def _require_supported_parts(block: VitttBlock) -> None:
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


def _parameters(block: VitttBlock, dtype: torch.dtype) -> VitttBlockParameters:
    """The op's parameters: weights of products packed, others copied."""
    mixer, ttt, mlp = block.mixer, block.mixer.ttt, block.mlp
    learner = ttt.learner
    nothing = block.norm.weight.new_empty(0, dtype=torch.float32)

    def taken(x: Tensor | None) -> Tensor:
        return nothing if x is None else x.detach().float().clone()

    views, gate = ttt.in_proj.weight.split(
        (ttt.widths["k"] + ttt.widths["q"] + ttt.widths["v"], ttt.widths["gate"])
    )
    convolutions = []
    for conv in (ttt.conv_q, ttt.conv_k):
        convolves = isinstance(conv, DirectionalConv1d)
        convolutions += [taken(conv.weight.squeeze(1) if convolves else None)]
        convolutions += [taken(conv.bias if convolves else None)]
    state = [taken(x) for x in learner.state()]
    conv2d = None if mixer.conv2d is None else mixer.conv2d.weight.flatten(1).t()
    mlp_gate, mlp_value = mlp.fc1.weight.chunk(2)
    return VitttBlockParameters(
        taken(conv2d).contiguous(),
        *(taken(mixer.norm.weight), taken(mixer.norm.bias)),
        pack(views, dtype, of_block=True),
        pack(gate, dtype, of_block=True) if len(gate) else nothing,
        *(pack(ttt.rate_proj.weight, dtype, of_block=True), taken(ttt.rate_proj.bias)),
        *convolutions,
        *(state + [nothing] * (4 - len(state))),
        *(taken(learner.norm_weight), taken(learner.norm_bias), taken(learner.position_scale())),
        *(taken(ttt.merge.weight), taken(ttt.merge.bias)),
        pack(ttt.out_proj.weight, dtype, of_block=True),
        *(taken(block.norm.weight), taken(block.norm.bias)),
        *(
            pack(mlp_gate, dtype, of_block=True),
            pack(mlp_value, dtype, of_block=True),
            pack(mlp.fc2.weight, dtype, of_block=True),
        ),
    )
