"""What the ops of packed blocks refuse: errors that name the op that was called."""

import pytest
import torch

from vision_ttt.ops.packed.mamba_band import packed_mamba_band
from vision_ttt.ops.packed.mamba_block import MambaBlockSizes
from vision_ttt.ops.packed.vit3_band import packed_vit3_band
from vision_ttt.ops.packed.vit3_block import Vit3BlockSizes
from vision_ttt.ops.packed.vittt_band import VitttBandSizes, packed_vittt_band

Y, WEIGHTS, STATE = torch.ones(1, 4, 16), torch.zeros(16, dtype=torch.int32), torch.zeros(4)


def vittt_band(rows=(2, 0, 0), kernel=0, heads=1):
    sizes = VitttBandSizes(heads, 1, 0, 16, 4, kernel, 2, 0, 0, 0, 0, 0)
    options = {"rows": rows, "open_tokens": 0, "rate": 1.0, "eps": (1e-6,) * 4}
    packed_vittt_band(Y, WEIGHTS, STATE, None, sizes, **options)


def vit3_band(rows=(2, 0, 0), heads=1):
    sizes = Vit3BlockSizes(heads, 16, 0, 0, 0, 0)
    options = {"rows": rows, "total": 4, "loss_scale": 1.0, "eps": (1e-6,) * 2}
    packed_vit3_band(Y, WEIGHTS, None, sizes, **options)


def mamba_band(rank):
    sizes = MambaBlockSizes(16, 4, rank, 0)
    packed_mamba_band(Y, WEIGHTS, STATE, None, sizes, reverse=False, eps=1e-6)


REFUSED = {
    "vittt: no columns": (
        lambda: vittt_band(rows=(0, 0, 0)),
        "packed_vittt_band: width must be at least 1, got 0",
    ),
    "vittt: even kernel": (
        lambda: vittt_band(kernel=2),
        "packed_vittt_band: conv2d's kernel must be odd, got 2",
    ),
    "vittt: heads": (lambda: vittt_band(heads=3), "packed_vittt_band: 3 heads in 1 directions"),
    "vit3: no columns": (
        lambda: vit3_band(rows=(0, 0, 0)),
        "packed_vit3_band: width must be at least 1, got 0",
    ),
    "vit3: heads": (
        lambda: vit3_band(heads=3),
        "packed_vit3_band: 16 channels are not a multiple of 3 heads",
    ),
    "mamba: odd rank": (
        lambda: mamba_band(rank=3),
        "packed_mamba_band: rank must be even, got 3",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_bands(call, message):
    with pytest.raises(ValueError, match=message):
        call()
