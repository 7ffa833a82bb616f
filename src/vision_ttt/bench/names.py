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

RUNTIMES = {
    "for_inference": "vision_ttt.for_inference, packed and fused",
    "inductor": "torch.compile with weights frozen",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
"""How a model can be deployed on a CPU; in a contender's name after a colon."""

DEPLOYED = (
    *("deit_tiny_patch16_224:openvino", "deit_tiny_patch16_224:onnxruntime"),
    *("deit_tiny_patch16_224:for_inference", "vittt_tiny_patch16_224:for_inference"),
    "vit3_tiny_patch16_224:for_inference",
)
"""The default contenders for inference on a CPU, beside :data:`TINY`."""

TRAINED = ("vittt_tiny_patch16_224 (fused)",)
"""The default contenders for training steps, beside :data:`TINY`."""

MOST_LINES = 6
"""Of a picture: more cannot be told apart."""
