"""The names that the command line accepts. This module does not import PyTorch."""

OPS = ("ttt_linear", "ttt_mlp", "selective_scan")
"""The sequence ops."""

TINY = (
    "deit_tiny_patch16_224",
    "vittt_tiny_patch16_224",
    "vit3_tiny_patch16_224",
    "vim_tiny_patch16_224",
    "mambar_tiny_patch16_224",
)
"""The default contenders."""

RUNTIMES = {
    "for_inference": "vision_ttt.for_inference, packed and fused",
    "inductor": "torch.compile with weights frozen",
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-kernels": "ONNX Runtime with this package's kernels",
    "openvino": "OpenVINO",
    "openvino-kernels": "OpenVINO with this package's kernels",
}
"""Runtimes that deploy a model on a CPU → their description. A contender's label has the runtime
after a colon."""

DEPLOYED = (
    *("deit_tiny_patch16_224:openvino", "deit_tiny_patch16_224:onnxruntime"),
    *("deit_tiny_patch16_224:for_inference", "vittt_tiny_patch16_224:for_inference"),
    *("vit3_tiny_patch16_224:for_inference", "vim_tiny_patch16_224:for_inference"),
    *("mambar_tiny_patch16_224:for_inference", "vittt_tiny_patch16_224:openvino-kernels"),
    *("vittt_tiny_patch16_224:onnxruntime", "vittt_tiny_patch16_224:onnxruntime-kernels"),
)
"""The default contenders for inference on a CPU, in addition to :data:`TINY`."""

TRAINED = (
    *("vittt_tiny_patch16_224 (for_training)", "vim_tiny_patch16_224 (for_training)"),
    "mambar_tiny_patch16_224 (for_training)",
)
"""The default contenders for training steps, in addition to :data:`TINY`."""
