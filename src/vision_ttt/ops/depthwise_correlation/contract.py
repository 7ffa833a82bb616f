"""What depthwise_correlation asks of its arguments."""

from vision_ttt.ops._contract import Contract, Whole

CONTRACT = Contract(
    "depthwise_correlation",
    {"x": "B height*width C", "y": "B height*width C"},
    {"height": Whole(1), "width": Whole(1), "kernel_size": Whole(1)},
    odd=("kernel_size",),
)
