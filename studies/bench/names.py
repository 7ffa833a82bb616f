"""The names that `bench` accepts. This module does not import PyTorch."""

DENSE = (
    *("deit_tiny_patch16_224 (fused attention)", "deit_tiny_patch16_224:for_inference"),
    "vittt_tiny_patch16_224:for_inference",
)
"""The default contenders of `bench dense`."""

LANGUAGE_MODELS = {
    "ttt-linear": "TTT-Linear in the Transformer backbone",
    "ttt-mlp": "TTT-MLP in the Transformer backbone",
    "ttt-linear-mamba": "TTT-Linear in the Mamba backbone",
    "ttt-mlp-mamba": "TTT-MLP in the Mamba backbone",
    "llama": "transformers' Llama of the same widths, depth and heads",
    "mamba": "transformers' Mamba of the same width, with twice the blocks",
}
"""Language models → their description."""

LANGUAGE_VARIANTS = {
    "ttt-linear": ("for_inference", "for_training", "dual"),
    "ttt-mlp": ("for_inference", "for_training", "dual"),
    "ttt-linear-mamba": ("for_inference", "for_training", "dual"),
    "ttt-mlp-mamba": ("for_inference", "for_training", "dual"),
    "llama": ("for_inference", "static"),
    "mamba": (),
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
