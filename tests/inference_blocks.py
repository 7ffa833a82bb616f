"""Blocks of every family that for_inference supports, with parameters that hide no term."""

import functools

import torch
from timm.layers.activations import GELU, GELUTanh
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import nn

from vision_ttt.acceleration import PACKED_BLOCKS
from vision_ttt.layers import (
    TTTMLP,
    BidirectionalMamba,
    ConvMlp,
    DiT3Block,
    MambaBlock,
    TTTLinear,
    ViT3Block,
    ViT3TTT,
    VitttBlock,
    VitttMixer,
)
from vision_ttt.layers.rotary2d import rotary_table
from vision_ttt.models.linear_vit import LinearBlock

DIM = 64
TANH_GELU = functools.partial(nn.GELU, approximate="tanh")
PUBLISHED = {"bidirectional": True, "share_qk": True, "conv_kernel_size": 4, "gate": True}


def vittt(ttt=TTTLinear, *, conv2d=True, **kwargs):
    return VitttBlock(VitttMixer(DIM, ttt=ttt(DIM, 2, **kwargs), conv2d=conv2d), DIM, 176)


def linear(block=Block, **kwargs):
    """A block of a ViT made linear, its MLP three times as wide as its tokens."""
    return LinearBlock(block(DIM, 2, mlp_ratio=3, **kwargs), "swiglu")


BLOCKS = {
    "vittt": lambda: vittt(**PUBLISHED),
    "vittt with TTT-MLP": lambda: vittt(TTTMLP, **PUBLISHED),
    "the bare layer": lambda: vittt(conv2d=False),
    "q of its own": lambda: vittt(bidirectional=True, conv_kernel_size=3),
    "one state for both": lambda: vittt(**PUBLISHED, learnable_states=1, mini_batch_size=5),
    "vit3": lambda: ViT3Block(DIM, 2),
    "no bias": lambda: ViT3Block(DIM, mixer=ViT3TTT(DIM, 4, qkv_bias=False)),
    "h-vit3": lambda: ViT3Block(DIM, 2, mlp=ConvMlp(DIM, 272)),
    "dit3": lambda: DiT3Block(DIM, 2),
    "mamba": lambda: MambaBlock(DIM),
    "mamba of other sizes": lambda: MambaBlock(
        DIM, mixer=BidirectionalMamba(DIM, expand=3, conv_kernel_size=3, dt_rank=5)
    ),
    "linear": lambda: linear(qkv_bias=True),
    "linear, scaled": lambda: linear(init_values=0.5, act_layer=TANH_GELU, proj_bias=False),
    "linear, rotated": lambda: linear(EvaBlock, init_values=0.5, act_layer=GELU),
    "linear, rotated by halves": lambda: linear(EvaBlock, rotate_half=True, act_layer=GELUTanh),
}


def make(name):
    torch.manual_seed(0)
    block = BLOCKS[name]().eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    if isinstance(block, LinearBlock):  # so that the inner model's step counts in the outputs
        inner = block.attn.inner
        for state in (inner.w1, inner.w2, inner.w3):
            state.mul_(2)
        block.attn.qkv.weight[2 * DIM :].mul_(3)
    return block


def pack_block(block, dtype):
    (packed,) = (packed for packed in PACKED_BLOCKS if packed.kind is type(block))
    return packed(block, dtype)


def inputs(name, batch, grid):
    """What a block is called with."""
    y = torch.randn(batch, grid[0] * grid[1], DIM)
    if "rotated" in name:
        extra = (0, 1)
        y = torch.cat((y[:, :1], y[:, :1] - 1, y), dim=1)
        return y, grid, extra, torch.randn(grid[0] * grid[1], DIM)  # 2 d of two heads
    if name == "dit3":
        return y, torch.randn(batch, DIM), grid
    if name == "h-vit3":
        return y, grid, rotary_table(grid, DIM)
    return y, grid
