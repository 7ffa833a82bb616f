"""The names that the command line accepts. This module does not import PyTorch."""

OPS = ("ttt_linear", "ttt_mlp", "selective_scan")
"""The sequence ops."""

FLASH_LINEAR_ATTENTION = "flash-linear-attention"
"""Another project's implementation of `ttt_linear` for GPUs."""

MAMBAPY = "mambapy"
"""Another project's selective scan, in PyTorch's operations."""

TINY = (
    "deit_tiny_patch16_224",
    "vittt_tiny_patch16_224",
    "vit3_tiny_patch16_224",
    "vim_tiny_patch16_224",
    "mambar_tiny_patch16_224",
)
"""The default contenders, as far as they are registered with timm."""

RUNTIMES = {
    "for_inference": "vision_ttt.for_inference, packed and fused",
    "inductor": "torch.compile with weights frozen",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
"""Runtimes that deploy a model on a CPU → their description. A contender's label has the runtime
after a colon."""

DEPLOYED = (
    *("deit_tiny_patch16_224:openvino", "deit_tiny_patch16_224:onnxruntime"),
    *("deit_tiny_patch16_224:for_inference", "vittt_tiny_patch16_224:for_inference"),
    *("vit3_tiny_patch16_224:for_inference", "vim_tiny_patch16_224:for_inference"),
    "mambar_tiny_patch16_224:for_inference",
)
"""The default contenders for inference on a CPU, in addition to :data:`TINY`."""

TRAINED = (
    *("vittt_tiny_patch16_224 (for_training)", "vim_tiny_patch16_224 (for_training)"),
    "mambar_tiny_patch16_224 (for_training)",
)
"""The default contenders for training steps, in addition to :data:`TINY`."""

LANGUAGE_MODELS = {
    "ttt-linear": "TTT-Linear in the Transformer backbone",
    "ttt-mlp": "TTT-MLP in the Transformer backbone",
    "ttt-linear-mamba": "TTT-Linear in the Mamba backbone",
    "ttt-mlp-mamba": "TTT-MLP in the Mamba backbone",
    "llama": "transformers' Llama of the same widths, depth and heads",
}
"""Language models → their description."""

LANGUAGE_VARIANTS = {
    "ttt-linear": ("for_inference", "for_training", "dual"),
    "ttt-mlp": ("for_inference", "for_training", "dual"),
    "ttt-linear-mamba": ("for_inference", "for_training", "dual"),
    "ttt-mlp-mamba": ("for_inference", "for_training", "dual"),
    "llama": ("for_inference", "static"),
}
"""Language models → what a label may have after a colon.

for_inference: packed products; for_training: linear layers by our products, as the recipe trains
it; dual: all ops in PyTorch's matrix products, as the release trains; static: packed products and a
cache that is allocated once for all tokens."""

LANGUAGE_SIZES = ("125m", "350m", "760m", "1.3b")
"""The published sizes of language models."""

READING = ("ttt-linear:for_inference", "llama:for_inference", "llama:static")
"""The default contenders of `bench lm` for prefill and decode."""

LEARNING = ("ttt-linear:for_training", "ttt-linear", "ttt-linear:dual", "llama")
"""The default contenders of `bench lm` for training steps."""

MOST_LINES = 6
"""The most lines of a figure. More cannot be distinguished."""
