"""What is counted does not depend on the kernel that computes it."""

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vision_ttt.bench import count_macs
from vision_ttt.bench.complexity import macs_of_pass


def test_attention_is_counted_whichever_kernel_runs():
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0, "img_size": 64}
    model = timm.create_model("deit_tiny_patch16_224", **sizes).eval()
    with torch.device("meta"):  # there attention consists of two products
        other = timm.create_model("deit_tiny_patch16_224", **sizes).eval()
    counted = count_macs(model, (3, 64, 64))
    assert counted == count_macs(other, (3, 64, 64))
    tokens, dim = 17, 32
    layers = 2 * (12 * dim**2 * tokens + 2 * dim * tokens**2)
    assert counted == layers + 16 * 3 * 16**2 * dim


def test_causal_attention_is_counted_without_the_scores_of_later_tokens():
    class Attention(nn.Module):
        def __init__(self, is_causal):
            super().__init__()
            self.is_causal = is_causal

        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal)

    x = torch.randn(1, 3, 10, 8)
    assert macs_of_pass(Attention(False), x) == 3 * 10 * 10 * 2 * 8
    assert macs_of_pass(Attention(True), x) == 3 * (10 * 11 // 2) * 2 * 8
