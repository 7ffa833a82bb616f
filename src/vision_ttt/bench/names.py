"""What the command line can name; free of PyTorch."""

OPS = ("ttt_linear", "ttt_mlp")
"""The ops that learn along the tokens."""

FLASH_LINEAR_ATTENTION = "flash-linear-attention"
"""The peer of `ttt_linear` on a GPU."""

TINY = (
    "deit_tiny_patch16_224",
    "vittt_tiny_patch16_224",
    "vim_tiny_patch16_224",
    "vit3_tiny_patch16_224",
)
"""The default contenders; of these, the registered ones."""
