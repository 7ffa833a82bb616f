"""What a training run is: one flat, frozen dataclass. Recipes are YAML files of its fields."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vision_ttt.errors import UserError


class ConfigError(UserError, ValueError):
    """A field, recipe key or model option that cannot be; names what came and what is accepted."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run, whole: model, data, augmentation, optimisation, machine and output.

    Raises:
        ConfigError: a value is out of its range (a `ValueError`).
        TypeError: a number was expected and something else came.
    """

    # The model
    model: str = "vittt_nano_patch4_32"
    """Model name in timm's registry (`vision-ttt models` lists ours)."""
    model_args: dict[str, Any] = field(default_factory=dict)
    """Further constructor arguments of the model, e.g. --model_args.depth 2. They add to the
    recipe's, key by key; null takes the recipe's away, so that the model's own holds."""
    image_size: int | None = None
    """Height and width of the model's input in pixels; null: the model's own."""
    drop_path: float | None = None
    """Stochastic depth: the probability that the last block is skipped (0 to <1), growing linearly
    from 0 at the first; null: the model's own."""
    initial_weights: str | None = None
    """Path of a .safetensors file to start from; its classifier is taken only where its shape fits.
    null: random initialisation."""
    frozen_layers: int | Literal["all"] = 0
    """Layers, counted from the input (first the patch embedding, then the blocks), that stay as
    they are; the classifier always learns. all: it alone does."""

    # Diffusion, of models that denoise (dit3_*)
    objective: Literal["noise", "flow"] = "noise"
    """What such a model learns to tell of a noisy image: noise, the noise, and the variances of
    denoising where the model has them; flow, the velocity from image to noise (flow matching)."""
    noise_schedule: Literal["linear", "cosine"] = "linear"
    """How the noise of objective noise grows."""
    noise_steps: int = 1000
    """Steps in which it grows (>= 2)."""

    # The data
    dataset: str = "digits"
    """"digits" (scikit-learn's), an image folder (with train/ and val/ or test/, or one folder per
    class), a folder of webdataset shards (*.tar), or a name that timm.data.create_dataset reads,
    such as hfds/NAME or wds/NAME."""
    dataset_root: str | None = None
    """Folder given to timm.data.create_dataset beside the name; digits and folders have none."""
    train_split: str = "train"
    """Name of the training split, for datasets read by timm."""
    test_split: str = "validation"
    """Name of the test split, for datasets read by timm."""
    test_fraction: float = 0.2
    """Fraction of images held out for test (0 to 1, exclusive) where a folder has no split of its
    own; the choice is stratified and fixed, whatever the seed."""
    num_classes: int | None = None
    """Number of classes, for datasets that do not tell; null: ask the dataset. It must not differ
    from what the dataset tells."""
    skip_bad: bool = False
    """Go on where an image does not decode, and name and count it; otherwise stop."""
    num_workers: int = 0
    """Processes that decode and augment images, per training process (up to 256); 0: that itself
    does."""
    loader_timeout: float = 300.0
    """Seconds to wait for a worker's batch before stopping; 0: for ever."""

    # Augmentation (of training images)
    crop_scale: float = 0.08
    """Least area of the random resized crop, as a fraction of the image (>0 to 1)."""
    crop_ratio: float = 1.3333
    """Largest aspect ratio of the random resized crop, its inverse being the smallest (>= 1)."""
    crop_fraction: float | None = None
    """Side of the centre crop at test, as a fraction of the resized image's (>0 to 1); null: the
    model's own."""
    horizontal_flip: float = 0.5
    """Probability of a left-right flip (0 to 1)."""
    color_jitter: float = 0.0
    """Strength of brightness, contrast and saturation jitter (>= 0); 0 beside RandAugment,
    AutoAugment and AugMix, which vary colours themselves."""
    auto_augment: str | None = None
    """Policy in timm's words: RandAugment, e.g. rand-m9-mstd0.5-inc1, AutoAugment, e.g. v0, AugMix,
    e.g. augmix-m5-w4-d2, or ThreeAugment, 3a; null: none."""
    repeated_augmentation: int = 1
    """Times that an image is seen, differently augmented, in the batches it is drawn into; an epoch
    has as many images as ever, so that it sees fewer different ones."""
    random_erasing: float = 0.0
    """Probability that a random rectangle is overwritten with noise (0 to 1)."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution (>= 0); 0: no mixup."""
    cutmix: float = 0.0
    """Alpha of CutMix's Beta distribution (>= 0); 0: no CutMix. With both, a coin is tossed."""
    label_smoothing: float = 0.1
    """Probability mass spread evenly over all classes (0 to <1)."""

    # Optimisation, by AdamW
    epochs: int = 300
    """Passes over the training images."""
    batch_size: int = 1024
    """Images per optimiser update, over all processes and accumulation steps together."""
    accumulation_steps: int = 1
    """Parts that a batch is cut into to save memory; their gradients are summed."""
    learning_rate: float = 1e-3
    """Largest learning rate, reached after warm-up. Not scaled by the batch size."""
    minimum_learning_rate: float = 1e-6
    """Learning rate that the cosine ends at."""
    warmup_learning_rate: float = 1e-6
    """Learning rate that the linear warm-up begins at."""
    warmup_epochs: float = 20
    """Length of the warm-up in epochs, counted within `epochs`. Where --epochs is less than the
    recipe's, it shrinks with them unless it is given, too."""
    inner_warmup_epochs: float = 0.0
    """Epochs in which the inner learning rates of TTT-MLP layers rise linearly from 0 to their full
    size; the TTT paper takes a tenth of `epochs`. 0: full from the first update on."""
    weight_decay: float = 0.05
    """Decoupled weight decay; not on biases, norms and what the model's no_weight_decay names."""
    beta1: float = 0.9
    """Decay of Adam's running mean of gradients (0 to <1)."""
    beta2: float = 0.999
    """Decay of Adam's running mean of squared gradients (0 to <1)."""
    layer_decay: float | None = None
    """Factor on the learning rate per layer from the head down to the input (>0 to 1); null: 1."""
    clip_norm: float = 5.0
    """Largest L2 norm of the gradient, above which it is scaled down; 0: no clipping."""
    ema_decay: float = 0.0
    """Decay of the weights' exponential moving average, per update, warmed up from 0 (0 to <1); the
    average is what is evaluated and saved. 0: no average."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Where the loss or a gradient is NaN or infinite: stop, or skip the update, which leaves
    weights, moments and average as they are; ten in a row, or an epoch's, stop all the same."""

    # The machine
    precision: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward; bfloat16 is by autocast, weights stay float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    sharding: Literal["replicated", "sharded"] = "replicated"
    """How several processes (torchrun) hold the model: each the whole of it (DDP), or each a part
    of every weight, gradient and moment (FSDP): less memory, more communication."""

    # The run
    seed: int = 0
    """Seed of everything random: weights, order, augmentation, drop path (>= 0)."""
    output: str = "runs/train"
    """Run directory, for config, metrics, logs and checkpoints."""
    checkpoint_every: int | None = None
    """Updates from one checkpoint to the next; null: at each epoch's end only, where there is one
    in any case."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept to resume from. One alone has none to fall back to."""
    wandb_project: str | None = None
    """Project at Weights & Biases to log to as well (needs the package wandb); null: none."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            _check_type(each.name, getattr(self, each.name))
        for name, (low, high, meaning) in _RANGES.items():
            value = getattr(self, name)
            if value is None or isinstance(value, str):
                continue
            if not math.isfinite(value) or not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be {meaning}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            is_number = name in _RANGES and not isinstance(value, str)
            if value not in words and not is_number:
                raise ConfigError(f"{name} is {value!r}; it must be {_accepted(name)}")
        try:
            json.dumps(self.model_args)  # as checkpoints hold them
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"model_args is {self.model_args!r}; {error}") from error
        self._check_together()

    def _check_together(self) -> None:
        """Raise ConfigError unless each value goes with the others."""
        for name, most in (
            ("warmup_epochs", "epochs"),
            ("inner_warmup_epochs", "epochs"),
            ("repeated_augmentation", "batch_size"),
        ):
            if getattr(self, name) > getattr(self, most):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at most {most}"
                    f" ({getattr(self, most)})"
                )
        if self.batch_size % self.accumulation_steps:
            raise ConfigError(
                f"batch_size is {self.batch_size}; it must be a multiple of accumulation_steps"
                f" ({self.accumulation_steps})"
            )
        if self.mixes_images and self.micro_batch_size % 2:
            raise ConfigError(
                f"batch_size / accumulation_steps is {self.micro_batch_size}; it must be even, as"
                " mixup and CutMix mix images in pairs"
            )
        if self.color_jitter and self.auto_augment and "3a" not in self.auto_augment:
            raise ConfigError(
                f"color_jitter is {self.color_jitter}; beside auto_augment {self.auto_augment!r},"
                " which varies colours itself, it must be 0"
            )

    @property
    def micro_batch_size(self) -> int:
        """Images per forward pass, over all processes."""
        return self.batch_size // self.accumulation_steps

    @property
    def mixes_images(self) -> bool:
        """Whether mixup or CutMix is on."""
        return self.mixup > 0 or self.cutmix > 0


_BELOW_ONE = math.nextafter(1.0, 0.0)
_ABOVE_ZERO = math.nextafter(0.0, 1.0)
_PROBABILITY = (0.0, 1.0, "from 0 to 1")
_SHARE = (0.0, _BELOW_ONE, "from 0 to below 1")
_FRACTION = (_ABOVE_ZERO, 1.0, "above 0 and at most 1")
_NOT_NEGATIVE = (0.0, math.inf, "at least 0")
_POSITIVE = (_ABOVE_ZERO, math.inf, "above 0")
_COUNT = (1, math.inf, "at least 1")
MOST_WORKERS = 256
"""Processes that load images, per training process; more are a slip of the finger."""

_RANGES: dict[str, tuple[float, float, str]] = {
    "image_size": (1, 16_384, "from 1 to 16,384"),
    "drop_path": _SHARE,
    "test_fraction": (_ABOVE_ZERO, _BELOW_ONE, "above 0 and below 1"),
    "noise_steps": (2, 100_000, "from 2 to 100,000"),
    "num_classes": (2, math.inf, "at least 2"),
    "frozen_layers": _NOT_NEGATIVE,
    "num_workers": (0, MOST_WORKERS, f"from 0 to {MOST_WORKERS}"),
    "loader_timeout": (0.0, 1e6, "from 0 to 1,000,000"),
    "crop_scale": _FRACTION,
    "crop_ratio": (1.0, math.inf, "at least 1"),
    "crop_fraction": _FRACTION,
    "horizontal_flip": _PROBABILITY,
    "color_jitter": _NOT_NEGATIVE,
    "random_erasing": _PROBABILITY,
    "repeated_augmentation": _COUNT,
    "mixup": _NOT_NEGATIVE,
    "cutmix": _NOT_NEGATIVE,
    "label_smoothing": _SHARE,
    "epochs": _COUNT,
    "batch_size": _COUNT,
    "accumulation_steps": _COUNT,
    "learning_rate": _POSITIVE,
    "minimum_learning_rate": _NOT_NEGATIVE,
    "warmup_learning_rate": _NOT_NEGATIVE,
    "warmup_epochs": _NOT_NEGATIVE,
    "inner_warmup_epochs": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "beta1": _SHARE,
    "beta2": _SHARE,
    "layer_decay": _FRACTION,
    "clip_norm": _NOT_NEGATIVE,
    "ema_decay": _SHARE,
    "seed": (0, 2**32 - 1, "from 0 to 2^32 - 1"),
    "checkpoint_every": _COUNT,
    "keep_checkpoints": _COUNT,
}
_WORDS = {
    "objective": ("noise", "flow"),
    "noise_schedule": ("linear", "cosine"),
    "precision": ("float32", "bfloat16"),
    "non_finite": ("stop", "skip"),
    "sharding": ("replicated", "sharded"),
    "frozen_layers": ("all",),
}
_WHOLE = {
    *("image_size", "num_classes", "frozen_layers", "num_workers", "repeated_augmentation"),
    *("epochs", "batch_size", "accumulation_steps", "seed", "noise_steps"),
    *("checkpoint_every", "keep_checkpoints"),
}
_TEXTS = {
    *("model", "dataset", "train_split", "test_split", "output"),
    *("initial_weights", "dataset_root", "auto_augment", "wandb_project"),
}
_OPTIONAL = {
    *("image_size", "drop_path", "num_classes", "crop_fraction", "layer_decay"),
    *("checkpoint_every", "initial_weights", "dataset_root", "auto_augment", "wandb_project"),
}
_SWITCHES = {"skip_bad", "compile", "gradient_checkpointing"}
FIELDS = tuple(each.name for each in dataclasses.fields(TrainConfig))


def _check_type(name: str, value: Any) -> None:
    """Raise TypeError or ConfigError unless `value` has the type of field `name`."""
    if value is None and name in _OPTIONAL:
        return
    if name in _TEXTS:
        if not isinstance(value, str) or not value or "\0" in value:
            orelse = " or null" if name in _OPTIONAL else ""
            raise ConfigError(f"{name} is {value!r}; it must be a non-empty string{orelse}")
    elif name in _SWITCHES:
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; true or false is needed")
    elif name in _RANGES and not (name in _WORDS and isinstance(value, str)):
        kinds, kind = ((int,), "whole number") if name in _WHOLE else ((int, float), "number")
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}; a {kind} is needed ({_accepted(name)})")
    elif name == "model_args" and not isinstance(value, dict):
        raise TypeError(f"model_args is {value!r}; a mapping of names to values is needed")


def _accepted(name: str) -> str:
    """What a number or word may be."""
    ranges = (_RANGES[name][2],) if name in _RANGES else ()
    return " or ".join((*ranges, *_WORDS.get(name, ())))
