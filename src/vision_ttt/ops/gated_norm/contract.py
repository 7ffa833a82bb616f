"""What gated_norm asks of its arguments."""

from vision_ttt.ops._contract import Contract, Real

CONTRACT = Contract(
    "gated_norm",
    {"z": "B T R*D", "gate": "? B T D", "weight": "R D", "bias": "R D"},
    {"eps": Real(0)},
)
BACKWARD_CONTRACT = CONTRACT.preceded_by(grad="B T D")
