"""What depthwise_conv2d asks of its arguments."""

from vision_ttt.ops._contract import Contract, Whole

CONTRACT = Contract(
    "depthwise_conv2d",
    {"x": "B height*width C", "weight": "C 1 K K"},
    {"height": Whole(1), "width": Whole(1)},
    odd=("K",),
)
BACKWARD_CONTRACT = CONTRACT.preceded_by(grad="B height*width C")
