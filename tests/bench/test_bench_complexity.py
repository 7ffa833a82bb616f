"""What is counted does not depend on the kernel that computes it."""

import timm
import torch

from vision_ttt.bench import count_macs


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
