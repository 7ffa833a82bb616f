"""DiT³: a diffusion model of images or latents, conditioned on a class, of linear cost.

Shape letters: B images, C channels, T tokens on a grid (h, w), D width, p the patch's side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import PretrainedCfg
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from vision_ttt.layers.diffusion_conditioning import LabelEmbedding, TimestepEmbedding
from vision_ttt.layers.dit3 import DiT3Block, DiT3Head
from vision_ttt.layers.sincos2d import sincos_table
from vision_ttt.models.arguments import check_arguments, check_sides, mlp_width
from vision_ttt.models.block_sequence import run_block
from vision_ttt.models.building import build_model
from vision_ttt.models.registry import register_denoiser
from vision_ttt.models.torchscript import NotScriptable
from vision_ttt.models.weight_decay import undecayed_parameters
from vision_ttt.ops._contract import is_readable

torch.fx.wrap("sincos_table")

RELEASED_GUIDED_CHANNELS = 3
"""The release guides three channels of a latent, though it has four."""


class DiT3(NotScriptable, nn.Module):
    """DiT³: noisy images [B, C, H, W], times [B] and classes [B] → the predicted noise.

    DiT (Peebles and Xie) with ViT³'s blocks (ViT³, supplement, Sec. 3 and Table 3)::

        x = Linear(patches) + positions              fixed sines and cosines of row and column
        c = embedding of the time + embedding of the class
        x = blocks(x, c)                             see :class:`vision_ttt.layers.DiT3Block`
        out = patches put back, C channels, with ``learn_sigma`` 2 C

    Of 2 C channels the first half is the noise, the second parametrises the variance of a denoising
    step. Positions are computed for the size at hand: the same weights support any number of whole
    patches, square or not.

    Args:
        input_size: height and width that images are generated in, one number for both.
        patch_size: p.
        in_channels: C; 4 for latents of an autoencoder, as released, 3 for pixels.
        hidden_size: D, a multiple of 4.
        depth: number of blocks.
        num_heads: heads of the gated linear unit; the convolution is one more.
        num_classes: classes 0 … num_classes - 1; ``num_classes`` itself means no class.
        class_dropout_prob: probability of dropping a label in training; with 0 the model has no
            vector for no class and does not support guidance.
        learn_sigma: also predict variances.
        mlp_ratio: hidden width of the MLPs over D.

    Initialisation (adaLN-Zero): projections Xavier uniform, embeddings and the time's projections
    normal with standard deviation 0.02, inner models as in :class:`vision_ttt.layers.ViT3TTT`,
    biases zero; the blocks' modulation and the last projection zero: every block starts as its
    convolution alone, and the output as 0.

    Raises:
        ValueError: an argument is out of its range; in forward, shapes or labels do not fit.
    """

    def __init__(
        self,
        input_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 4,
        hidden_size: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        num_classes: int = 1000,
        class_dropout_prob: float = 0.1,
        learn_sigma: bool = True,
        mlp_ratio: float = 4.0,
    ) -> None:
        super().__init__()
        check_arguments(
            in_channels=in_channels,
            hidden_size=hidden_size,
            depth=depth,
            num_heads=num_heads,
            num_classes=num_classes,
            class_dropout_prob=class_dropout_prob,
            learn_sigma=learn_sigma,
        )
        if not num_classes and not class_dropout_prob:
            raise ValueError(
                "num_classes is 0 and class_dropout_prob 0: the model would accept no label;"
                " accepted: either above 0"
            )
        check_sides(input_size, patch_size, names=("input_size", "patch_size"))
        if not isinstance(patch_size, int):
            raise TypeError(f"patch_size is {patch_size!r}; accepted: one number, for both sides")
        mlp_width(hidden_size, mlp_ratio)  # each block makes its own
        self.input_size = to_2tuple(input_size)
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.out_channels = in_channels * (2 if learn_sigma else 1)
        self.num_classes = num_classes
        self.learn_sigma = learn_sigma
        self.grad_checkpointing = False
        if hidden_size % 4:
            raise ValueError(f"hidden_size is {hidden_size}; it must be a multiple of 4")
        self.patch_embed = nn.Conv2d(in_channels, hidden_size, patch_size, patch_size)
        self.time_embed = TimestepEmbedding(hidden_size)
        self.label_embed = LabelEmbedding(num_classes, hidden_size, class_dropout_prob)
        self.blocks = nn.ModuleList(
            DiT3Block(hidden_size, num_heads, mlp_ratio=mlp_ratio) for _ in range(depth)
        )
        self.head = DiT3Head(hidden_size, patch_size**2 * self.out_channels)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.xavier_uniform_(self.patch_embed.weight.flatten(1))
        nn.init.zeros_(self.patch_embed.bias)
        for block in self.blocks:
            for projection in (block.ttt.qkv, block.ttt.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.xavier_uniform_(projection.weight)

    # the contract of optimisers and training

    def no_weight_decay(self) -> set[str]:
        """The inner models' initial states and the table of classes (vectors go anyway)."""
        return {*undecayed_parameters(self), "label_embed.table.weight"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer decay: the embeddings, each block, the head."""
        return {
            "stem": r"^(?:patch|time|label)_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^head", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade compute for memory: keep only each block's input for the backward pass."""
        self.grad_checkpointing = enable

    # forward

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict the noise.

        Args:
            x: noisy images [B, C, H, W].
            t: times [B], whole or not; 0 to 1000 for the released weights.
            y: classes [B], ``num_classes`` for none.

        Returns:
            [B, C, H, W], with ``learn_sigma`` [B, 2 C, H, W].

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: shapes or labels do not fit.
        """
        self._refuse_tracing()
        labels = self.label_embed.table.num_embeddings
        _check_inputs(x, t, y, self.in_channels, self.patch_size, self.num_classes, labels)
        x = self.patch_embed(x)  # [B, D, h, w]
        grid = (x.shape[-2], x.shape[-1])
        positions = sincos_table(grid, x.shape[1], x.device)
        x = x.flatten(2).transpose(1, 2).contiguous() + positions.to(x.dtype)
        c = self.time_embed(t) + self.label_embed(y)
        for block in self.blocks:
            x = run_block(block, x, c, grid, checkpointing=self.grad_checkpointing)
        return self._unpatchify(self.head(x, c), grid)

    def forward_with_cfg(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        cfg_scale: float,
        guided_channels: int = RELEASED_GUIDED_CHANNELS,
    ) -> Tensor:
        """Predict the noise with classifier-free guidance, as released.

        The first half of the images and times is evaluated twice: with the classes of the first
        half of ``y`` and with those of the second half, which should be ``num_classes``. In the
        guided channels both halves of the result are e∅ + s (e_y - e∅), in the others each half is
        its own prediction.

        Args:
            x: noisy images [2 B, C, H, W]; the second half is ignored.
            t: times [2 B]; the second half is ignored.
            y: classes [2 B], the second half those to be guided away from.
            cfg_scale: s; 1 gives the prediction for the class, 0 that for no class.
            guided_channels: number of the first channels that are guided; the release guides 3 of
                a latent's 4. ``in_channels`` guides all channels of the noise.

        Raises:
            ValueError: as in forward; the batch is odd; guided_channels is out of its range.
        """
        if len(x) % 2:
            raise ValueError(f"guidance requires a batch of two halves, got {list(x.shape)}")
        most = max(RELEASED_GUIDED_CHANNELS, self.out_channels)
        if not 1 <= guided_channels <= most:
            raise ValueError(f"guided_channels is {guided_channels}; accepted: 1 to {most}")
        images, times = (first.chunk(2)[0] for first in (x, t))
        out = self(torch.cat((images, images)), torch.cat((times, times)), y)
        noise, rest = out[:, :guided_channels], out[:, guided_channels:]
        conditional, unconditional = noise.chunk(2)
        guided = unconditional + cfg_scale * (conditional - unconditional)
        return torch.cat((torch.cat((guided, guided)), rest), dim=1)

    def example_inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of :meth:`forward` for images x, time 0 and class 0, e.g. for counting MACs."""
        return x, x.new_zeros(len(x)), torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def _unpatchify(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens [B, T, p · p · C], channels fastest, → [B, C, p h, p w]."""
        side = self.patch_size
        x = x.unflatten(-1, (side, side, -1)).unflatten(1, grid)  # [B, h, w, p, p, C]
        x = x.permute(0, 5, 1, 3, 2, 4)  # [B, C, h, p, w, p]
        return x.flatten(4, 5).flatten(2, 3)


@torch.fx.wrap
@has_side_effect  # a graph of torch.fx keeps it, though nothing uses its result
def _check_inputs(
    x: Tensor, t: Tensor, y: Tensor, channels: int, patch_size: int, num_classes: int, labels: int
) -> None:
    for name, given in (("x", x), ("t", t), ("y", y)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if x.ndim != 4 or x.shape[1] != channels:
        raise ValueError(f"x must be [B, {channels}, H, W], got {list(x.shape)}")
    height, width = x.shape[2:]
    if height < 1 or width < 1 or height % patch_size or width % patch_size:
        side = patch_size
        raise ValueError(f"images of {height} × {width} are not whole patches of {side} × {side}")
    if t.shape != x.shape[:1] or y.shape != x.shape[:1]:
        raise ValueError(
            f"t and y must be [{len(x)}], one for each of x {list(x.shape)}, got "
            f"{list(t.shape)} and {list(y.shape)}"
        )
    if y.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"y must be classes as int64 or int32, got {y.dtype}")
    if is_readable(y):
        check_labels(y, num_classes, labels)


def check_labels(y: Tensor, num_classes: int, labels: int) -> None:
    """Raise ValueError unless each of y [B] is 0 to ``labels`` - 1: a class, or none of them."""
    if len(y) and (y.min() < 0 or y.max() >= labels):
        none = f", {labels - 1} being none" if labels > num_classes else ""
        raise ValueError(f"y must be classes 0 to {labels - 1}{none}, got {y.tolist()}")


SIZES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_size": 128, "depth": 6, "num_heads": 4},
    "small": {"hidden_size": 384, "depth": 12, "num_heads": 6},
    "base": {"hidden_size": 768, "depth": 12, "num_heads": 12},
}


def _config(channels: int) -> PretrainedCfg:
    """timm's description of a model's input and weights: pixels from -1 to 1, or latents."""
    return PretrainedCfg(
        input_size=(channels, 32, 32),
        fixed_input_size=True,
        crop_pct=1.0,
        interpolation="bicubic",
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        num_classes=1000,
        license="apache-2.0",
    )


PIXELS, LATENTS = _config(3), _config(4)


def _dit3(img_size: int | tuple[int, int], in_chans: int, **kwargs: Any) -> DiT3:
    return DiT3(input_size=img_size, in_channels=in_chans, **kwargs)


def _entrypoint(
    size: str, patch: int, config: PretrainedCfg, description: str
) -> Callable[..., DiT3]:
    """Register the model of a size in ``SIZES`` and a patch; returns the function that builds it.

    That accepts timm's names img_size and in_chans as well as input_size and in_channels.
    """
    name = f"dit3_{size}_patch{patch}_32"

    def create(pretrained: bool = False, **kwargs: Any) -> DiT3:
        for ours, timms in (("input_size", "img_size"), ("in_channels", "in_chans")):
            if ours in kwargs:
                kwargs[timms] = kwargs.pop(ours)
        own = {**SIZES[size], "patch_size": patch, "pretrained_cfg": config.to_dict()}
        model = build_model(_dit3, name, pretrained, **{**own, **kwargs})
        channels = model.in_channels
        model.pretrained_cfg |= {
            "input_size": (channels, *model.input_size),
            "mean": (0.5,) * channels,
            "std": (0.5,) * channels,
        }
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = description
    return register_denoiser(config)(create)


dit3_nano_patch4_32 = _entrypoint(
    "nano", 4, PIXELS, "DiT³ for 32 × 32 pixels and a laptop: 64 tokens."
)
dit3_small_patch8_32 = _entrypoint("small", 8, LATENTS, "DiT³-S/8 of 32 × 32 latents: 16 tokens.")
dit3_small_patch4_32 = _entrypoint("small", 4, LATENTS, "DiT³-S/4 of 32 × 32 latents: 64 tokens.")
dit3_small_patch2_32 = _entrypoint("small", 2, LATENTS, "DiT³-S/2 of 32 × 32 latents: 256 tokens.")
dit3_base_patch8_32 = _entrypoint("base", 8, LATENTS, "DiT³-B/8 of 32 × 32 latents: 16 tokens.")
dit3_base_patch4_32 = _entrypoint("base", 4, LATENTS, "DiT³-B/4 of 32 × 32 latents: 64 tokens.")
dit3_base_patch2_32 = _entrypoint("base", 2, LATENTS, "DiT³-B/2 of 32 × 32 latents: 256 tokens.")
