"""What directional_conv1d asks of its arguments."""

from vision_ttt.ops._contract import Contract, Whole

CONTRACT = Contract(
    "directional_conv1d",
    {"x": "B T C", "weight": "C 1 K", "bias": "C"},
    {"reverse_channels": Whole(0, "C")},
)
BACKWARD_CONTRACT = CONTRACT.preceded_by(grad="B T C")
