"""How exact another project's implementation must be: it computes the same function, rounded more.

Some round the factors of float32 products to TF32.
"""

import torch

TOLERANCES = {
    torch.float32: (1e-2, 5e-2),
    torch.bfloat16: (5e-2, 1e-1),
    torch.float16: (1e-2, 5e-2),
}
"""Dtype → the largest relative errors of outputs and of gradients."""
