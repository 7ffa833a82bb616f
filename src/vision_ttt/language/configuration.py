"""The configuration of TTT language models."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from vision_ttt.errors import suggestions

_SIZES = {
    "125m": (768, 2048, 12, 12),
    "350m": (1024, 2736, 24, 16),
    "760m": (1536, 4096, 24, 16),
    "1.3b": (2048, 5504, 24, 32),
}
"""Name → (hidden_size, intermediate_size, num_hidden_layers, num_attention_heads)."""

_BASE_RATES = {"linear": 1.0, "mlp": 0.1}
"""Inner model → ttt_base_lr (TTT, Sec. 2.7 and Appendix C)."""

_ATTENTION = ("linear_attention", "normalised_linear_attention")
"""What else a layer may have in the place of inner models (TTT, Table 1)."""

_EARLIER_KEYS = frozenset(
    (
        *("torch_dtype", "torchscript", "pruned_heads", "tie_encoder_decoder", "is_decoder"),
        *("use_bfloat16", "tf_legacy_loss", "finetuning_task", "tokenizer_class", "prefix"),
        *("add_cross_attention", "cross_attention_hidden_size", "task_specific_params"),
        *("num_labels", "name_or_path", "output_attentions", "attn_implementation"),
        *("experts_implementation", "per_layer_config", "auto_map", "model_type"),
        *("classifier_dropout", "hidden_dropout"),  # read by its heads
    )
)
"""Keys that transformers, of this or an earlier version, gives to every configuration."""

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "mini_batch_size", "conv_kernel", "max_position_embeddings"),
)
_SWITCHES = (
    *("use_gate", "share_qk", "pre_conv", "tie_word_embeddings", "use_cache"),
    *("learnable_w0", "inner_norm", "learnable_eta"),
)
_POSITIVE = ("rms_norm_eps", "rope_theta", "ttt_base_lr", "initializer_range")


class TTTConfig(PreTrainedConfig):
    """Sizes and options of :class:`vision_ttt.language.TTTForCausalLM`, under the released names.

    The defaults are 1.3B parameters with the Transformer backbone; :meth:`of_size` has the other
    sizes. ``TTTConfig(**keys)`` takes the keys of a released config.json.

    Args:
        vocab_size: of the tokenizer.
        hidden_size: D, a multiple of twice ``num_attention_heads``: RoPE rotates pairs of channels.
        intermediate_size: of the SwiGLU MLPs.
        num_hidden_layers: blocks.
        num_attention_heads: inner models of a layer, H.
        tie_word_embeddings: use the embeddings as the head's weights.
        rms_norm_eps: of the RMSNorms; the inner norm and the norm after the inner model have 1e-6.
        rope_theta: base of the rotations within a mini-batch.
        mini_batch_size: tokens of an inner gradient step, b.
        ttt_layer_type: the inner model, "linear" or "mlp"; or "linear_attention" or
            "normalised_linear_attention" (:class:`vision_ttt.layers.LinearAttention`), which need
            the next two to be False.
        learnable_w0: learn the initial state. False: it is 0, which only linear models support.
        inner_norm: LN and residual connection in the inner model.
        learnable_eta: compute the inner learning rate of each token, and scale the update that the
            j-th token of a mini-batch sees by 1/j and a learned offset. False: the rate is η_base
            / d, and no update is scaled.
        ttt_base_lr: η_base. None: 0.1 for "mlp", 1 otherwise.
        use_gate: multiply the inner model's normalised output by GELU(Linear(x)).
        share_qk: project queries and keys by the same weights, each behind its own convolution.
        pre_conv: a residual convolution before each TTT layer.
        conv_kernel: taps of the convolutions.
        hidden_act: "silu", the MLPs' activation.
        initializer_range: standard deviation of the initial matrices and embeddings.
        use_cache: default of the argument ``use_cache`` of ``generate`` and of calls outside of
            training. False makes ``generate`` run all tokens again for each new token.
        max_position_embeddings: tokens of the sequences trained on. Nothing depends on it.
        pretraining_tp: 1, the only value: no product is cut up.
        scan_checkpoint_group_size: of no effect: how much is kept for the backward pass is decided
            by the ops.
        pad_token_id, bos_token_id, eos_token_id: of the tokenizer.

    Keys that transformers gives to every configuration are accepted, too.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of its range, or a key is unknown.
    """

    model_type = "ttt"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 32_000
    hidden_size: int = 2048
    intermediate_size: int = 5504
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    mini_batch_size: int = 16
    ttt_layer_type: str = "linear"
    learnable_w0: bool = True
    inner_norm: bool = True
    learnable_eta: bool = True
    ttt_base_lr: float | None = None
    use_gate: bool = False
    share_qk: bool = False
    pre_conv: bool = False
    conv_kernel: int = 4
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    use_cache: bool = True
    max_position_embeddings: int = 2048
    pretraining_tp: int = 1
    scan_checkpoint_group_size: int = 0
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def __post_init__(self, **further: Any) -> None:
        known = _EARLIER_KEYS | GenerationConfig().to_dict().keys()
        for key in further.keys() - known:
            if not key.startswith("_"):
                own = {field.name for field in dataclasses.fields(self)}
                raise ValueError(f"TTTConfig has no {key}; {suggestions(key, own)}")
        if self.ttt_base_lr is None:
            self.ttt_base_lr = _BASE_RATES.get(self.ttt_layer_type, 1.0)
        # TRL reads it of every configuration, and transformers looks up names in it.
        super().__post_init__(**{"auto_map": {}, **further})
        self.check()

    def check(self) -> None:
        """Refuse values of a wrong type or out of their range, also those that were set later.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive, got {value}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                "hidden_size must be a multiple of twice num_attention_heads, got "
                f"{self.hidden_size} and {self.num_attention_heads}"
            )
        accepted = {
            "ttt_layer_type": (*_BASE_RATES, *_ATTENTION),
            "hidden_act": ("silu",),
            "pretraining_tp": (1,),
        }
        for name, values in accepted.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"{name} must be {' or '.join(map(repr, values))}, got {value!r}")
        if self.ttt_layer_type in _ATTENTION and (self.learnable_w0 or self.inner_norm):
            raise ValueError(
                f"learnable_w0 and inner_norm must be False with {self.ttt_layer_type}, got "
                f"{self.learnable_w0} and {self.inner_norm}"
            )
        if self.ttt_layer_type == "mlp" and not self.learnable_w0:
            raise ValueError("learnable_w0 must be True with mlp: at 0 an MLP has no gradient")

    def to_dict(self) -> dict[str, Any]:
        """What is saved: all but an empty auto_map."""
        values = super().to_dict()
        if not self.auto_map:
            values.pop("auto_map", None)
        return values

    @classmethod
    def of_size(
        cls,
        size: str,
        *,
        layer: str = "linear",
        backbone: str = "transformer",
        **others: Any,
    ) -> TTTConfig:
        """The configuration of a published size (TTT, Table 3).

        Args:
            size: "125m", "350m", "760m" or "1.3b".
            layer: the inner model, "linear" or "mlp".
            backbone: "transformer", or "mamba": with gate, shared projection of queries and keys,
                and convolutions.
            others: further arguments of the constructor, such as ``vocab_size``.

        Raises:
            ValueError: a name is not among those above.
            TypeError: the constructor has no such argument, or takes another type.
        """
        backbones = {"transformer": False, "mamba": True}
        for name, value, accepted in (
            ("size", size, _SIZES),
            ("layer", layer, _BASE_RATES),
            ("backbone", backbone, backbones),
        ):
            if value not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
        if unknown := sorted(others.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise TypeError(f"TTTConfig has no {', '.join(unknown)}")
        hidden, intermediate, layers, heads = _SIZES[size]
        options = dict.fromkeys(("use_gate", "share_qk", "pre_conv"), backbones[backbone])
        arguments = {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ttt_layer_type": layer,
            **options,
        }
        return cls(**{**arguments, **others})
