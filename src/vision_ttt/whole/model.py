"""Models on whole pictures of any size, in bounded memory."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_ttt._version import __version__
from vision_ttt.acceleration.supported_parts import UnsupportedPart
from vision_ttt.acceleration.training import to_plain
from vision_ttt.dense import LinearSegmenter, TokenMap
from vision_ttt.models.linear_vit import LinearViT
from vision_ttt.models.plain_backbone import PlainBackbone
from vision_ttt.ops._native import LIBRARY
from vision_ttt.ops.packed.weights import DTYPES
from vision_ttt.whole.embedding import Embedding, Picture
from vision_ttt.whole.errors import WholePictureError
from vision_ttt.whole.linear_vit import BandedLinear
from vision_ttt.whole.mamba import BandedMamba
from vision_ttt.whole.pictures import NO_DATA, TensorPicture
from vision_ttt.whole.plan import PROCESS, Needs, Plan, parse_bytes
from vision_ttt.whole.run import Report, Run, descends
from vision_ttt.whole.scratch import Scratch, kept_on_errors
from vision_ttt.whole.sweeps import BandedBlock, stored_side
from vision_ttt.whole.vit3 import BandedViT3
from vision_ttt.whole.vittt import BandedVittt
from vision_ttt.whole.vrwkv import BandedChannelMix, BandedSpatialMix

BANDED: tuple[tuple[type[BandedBlock], ...], ...] = (
    *((BandedVittt,), (BandedViT3,), (BandedMamba,), (BandedLinear,)),
    (BandedSpatialMix, BandedChannelMix),
)
"""The banded forms of a block, in sequence. ``kind`` of the first one is the block's class."""

_WINDOW = 2**22
"""Logits that are interpolated to pixels at once: 16 MiB."""
_WINDOW_ROWS = 8
"""Rows of tokens of such a window."""


class WholePictures:
    """Runs a model on whole pictures of any size within a memory limit, without tiles.

    The model processes a picture block by block. Between two blocks, the tokens are in memory or in
    a scratch folder. Each block reads and writes them in bands of rows, and carries its state from
    band to band in each scan direction. The result equals that of ``for_inference(model)`` on the
    whole picture, up to rounding. The time is linear in the number of pixels.

    Supported models are Vittt, ViT³, Vim, Mamba-Reg and Vision-RWKV, of any size and number of
    classes, linearised ViTs without rotary positions whose inner model is "swiglu" or "vit3", and a
    :class:`vision_ttt.dense.LinearSegmenter` on one of them. They run on the CPU.

    Example:
        >>> whole = WholePictures(segmenter, memory="2GiB", scratch="/large/scratch")
        >>> print(whole.plan((32768, 32768)))
        >>> for rows, labels in whole.labels(picture):
        ...     mask[rows] = labels

    Args:
        model: it is copied, and must accept other sizes than its own (``dynamic_img_size=True``).
        memory: largest resident memory of the process, a number of bytes or text such as "2GiB".
            The limit holds if the process contains only PyTorch and the model. None uses as much
            memory as is fastest.
        scratch: folder for the tokens. It is created if it is missing, and removed after all
            results have been read. A killed run resumes from it if model, picture and arguments
            are the same. None keeps the tokens in memory.
        storage: dtype of the tokens between blocks: ``torch.float32``, or ``torch.bfloat16``, which
            takes half the space and rounds the tokens.
        dtype: of the packed weights, as of :func:`vision_ttt.for_inference`.

    Raises:
        TypeError: the model is of another kind, or an argument of another type.
        ValueError: a block has no form in bands, or an argument is out of its range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        memory: int | str | None = None,
        scratch: str | Path | None = None,
        storage: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.memory = parse_bytes("memory", memory)
        self.scratch = None if scratch is None else Path(scratch)
        if storage not in (torch.float32, torch.bfloat16):
            raise WholePictureError(
                f"storage is {storage}; accepted: torch.float32, torch.bfloat16"
            )
        self.storage = storage
        if dtype not in DTYPES or (LIBRARY is None and dtype != torch.float32):
            kernels = "" if LIBRARY is not None else "; the compiled kernels are missing"
            raise WholePictureError(f"dtype is {dtype}; accepted: {list(DTYPES)}{kernels}")
        self.dtype = dtype
        _backbone(model)  # which refuses models of other kinds
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if x.device.type != "cpu":
                raise WholePictureError(
                    f"WholePictures runs on the CPU; {name} is on {x.device}: give model.cpu()"
                )
        model = _plain(model)
        backbone = _backbone(model)
        # The copy omits the blocks: packed ones replace them, and the memory may not hold both.
        bare = copy.deepcopy(backbone, {id(backbone.blocks): nn.ModuleList()})
        self.backbone = bare.eval().float().requires_grad_(False)
        self.segment_head = None
        if isinstance(model, LinearSegmenter):
            self.segment_head = copy.deepcopy(model.head).float().requires_grad_(False)
        self.embedding = Embedding(
            self.backbone,
            pad=self.backbone.dynamic_img_pad or self.segment_head is not None,
            dtype=dtype,
        )
        self.blocks: list[BandedBlock] = []
        for index, block in enumerate(backbone.blocks):
            for kind in _banded(f"blocks.{index}", block):
                try:
                    descending = descends(len(self.blocks))
                    self.blocks.append(kind(block, dtype, descending=descending))
                except UnsupportedPart as unsupported:
                    raise WholePictureError(
                        f"blocks.{index} has no form in bands: {unsupported}"
                    ) from unsupported
        self._digest = None if self.scratch is None else _digest(model)
        self._weights = 4 * sum(x.numel() for x in model.parameters())

    def plan(self, picture: Sequence[int] | Tensor | Picture) -> Plan:
        """Compute the bands, the memory and the scratch space that a picture needs.

        Args:
            picture: its size (height, width), or the picture. A picture's plan includes the memory
                of its reader.

        Raises:
            TypeError: it is neither.
            ValueError: the model does not accept the size, or the memory is too small.
        """
        size, beside = picture, 0
        if isinstance(picture, Sequence):
            if len(size) != 2 or not all(isinstance(side, Integral) for side in size):
                raise TypeError(f"the size is {size!r}; accepted: (height, width) in whole pixels")
        else:
            picture = _picture(picture)
            size = picture.height, picture.width
            beside = getattr(picture, "memory", 0)
        needs = self._needs(beside)
        return needs.plan(self.embedding.grid(size), self.memory, in_memory=self.scratch is None)

    def tokens(
        self, picture: Tensor | Picture, *, report: Report | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the token grid, and the model's normalised tokens of them [n, w, D].

        Args:
            picture: [C, H, W] normalised, or one of :mod:`vision_ttt.whole.pictures`.
            report: called after each band with the number of bands done and their total number.

        Raises:
            ValueError: the picture does not fit the model, the memory or the disk, or has NaN or
                infinite pixels; or the scratch folder is of another run or damaged.
        """
        with self._run(picture, report) as run:
            for band in run.bands:
                x = run.tokens(band.first, band.last)
                yield slice(band.first, band.last), x.view(-1, run.grid[1], run.dim)

    def logits(self, picture: Tensor | Picture, *, report: Report | None = None) -> Tensor:
        """The classifier's logits [num_classes]; see :meth:`tokens` for arguments and errors.

        Raises:
            TypeError: the model is a segmenter.
            ValueError: the model does not pool its tokens.
        """
        if self.segment_head is not None:
            raise TypeError("a segmenter has logits per pixel: call labels()")
        if self.backbone.global_pool == "":
            raise WholePictureError("the model pools nothing (global_pool=''): call tokens()")
        with self._run(picture, report) as run:
            return self._classified(run)

    def labels(
        self, picture: Tensor | Picture, *, report: Report | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the picture, and the most probable class of their pixels [n, W].

        Labels are uint8, or int32 for over 256 classes. Pixels without data have the label 255.
        See :meth:`tokens` for arguments.

        Raises:
            TypeError: the model is no segmenter.
            ValueError: a logit is not finite, 255 is the label of a class and of pixels without
                data, or as of :meth:`tokens`.
        """
        if self.segment_head is None:
            raise TypeError("labels() is for a LinearSegmenter; this model classifies pictures")
        picture = _picture(picture)
        (stride,) = {*self.embedding.patch}
        has_gaps = getattr(picture, "has_gaps", False)
        if has_gaps and self.segment_head.out_channels > NO_DATA:
            raise WholePictureError(
                f"the model has {self.segment_head.out_channels} classes; pictures with pixels "
                f"without data, whose label is {NO_DATA}, support at most {NO_DATA}"
            )
        with self._run(picture, report) as run:
            for band in run.bands:
                for first in range(band.first, band.last, _WINDOW_ROWS):
                    last = min(first + _WINDOW_ROWS, band.last)
                    rows = slice(first * stride, min(last * stride, picture.height))
                    labels = self._labelled(run, first, last, picture.width)
                    labels = labels[: rows.stop - rows.start]
                    if has_gaps:
                        labels[~picture.has_data(rows.start, rows.stop)] = NO_DATA
                    yield rows, labels

    @contextmanager
    def _run(self, picture: Tensor | Picture, report: Report | None) -> Iterator[Run]:
        """Run all sweeps of a picture, and yield the run."""
        picture, backbone = _picture(picture), self.backbone
        if picture.channels != backbone.in_chans:
            raise WholePictureError(
                f"the picture has {picture.channels} channels, the model {backbone.in_chans}"
            )
        plan = self.plan(picture)
        extra, positions = torch.zeros(1, 0, backbone.embed_dim, dtype=torch.float32), ()
        if backbone.class_tokens is not None:
            count = plan.grid[0] * plan.grid[1]
            positions = backbone.class_tokens.positions(count)
            extra = self.embedding.norm(backbone.class_tokens.insert(extra))
        scratch = None
        if self.scratch is not None:
            identity = {
                "model": self._digest,
                "picture": picture.identity,
                "normalisation": repr(getattr(picture, "normalisation", None)),
                "size": [picture.height, picture.width],
                "rows of a band (memory)": plan.rows,
                "storage": str(self.storage),
                "dtype": str(self.dtype),
                "version": __version__,
            }
            scratch = Scratch(self.scratch, identity, plan)
        with kept_on_errors(scratch):
            run = Run(
                *(self.embedding, self.blocks, backbone.norm, extra, positions, plan),
                *(self.storage, scratch, report or (lambda done, total: None)),
            )
            try:
                run.run(picture)
                yield run
            finally:
                run.close()

    def _needs(self, beside: int) -> Needs:
        backbone, item = self.backbone, self.storage.itemsize
        side = max((block.side_width for block in self.blocks), default=0)
        side_item = stored_side(self.blocks, self.storage).itemsize
        dim, (high, wide) = backbone.embed_dim, self.embedding.patch
        band = max((block.band_width for block in self.blocks), default=0)
        swept = 4 * (5 * dim + 2 * side + band) + item * dim + side_item * side
        embedded = 12 * backbone.in_chans * high * wide + 12 * dim
        return Needs(
            # The model's weights, and the packed ones, which may be 1.5 times as large.
            fixed=PROCESS + beside + 5 * self._weights // 2 + 16 * _WINDOW,
            per_token=max(swept, embedded),
            halo=max((block.halo for block in self.blocks), default=0),
            stored_tokens=item * dim,
            stored_side=side_item * side,
        )

    @torch.no_grad()
    def _classified(self, run: Run) -> Tensor:
        backbone = self.backbone
        norm = backbone.fc_norm if isinstance(backbone, LinearViT) else nn.Identity()
        if backbone.global_pool == "avg":
            total = torch.zeros(run.dim, dtype=torch.float64)
            for band in run.bands:
                total += run.tokens(band.first, band.last).sum((0, 1), dtype=torch.float64)
            feature = norm((total / (run.grid[0] * run.grid[1])).float().unsqueeze(0))
        elif backbone.global_pool == "max_norm":
            feature = torch.cat([_strongest(run.tokens(*band[:2])) for band in run.bands])
            feature = norm(_strongest(feature.unsqueeze(0)))
        else:  # pooling class tokens does not read the image tokens
            feature = backbone.pool(backbone.join_tokens(run.extra()[:, :0], run.extra()))
        return backbone.head(backbone.head_drop(feature))[0]

    @torch.no_grad()
    def _labelled(self, run: Run, first: int, last: int, columns: int) -> Tensor:
        """Labels [n, columns] of the pixels of rows ``first`` … ``last`` - 1 of tokens.

        A window includes the neighbouring tokens that the interpolation reads, so its logits equal
        those of the whole picture.
        """
        (height, width), (stride,) = run.grid, {*self.embedding.patch}
        top, bottom = max(first - 1, 0), min(last + 1, height)
        x = run.tokens(top, bottom).view(1, bottom - top, width, -1).permute(0, 3, 1, 2)
        logits = self.segment_head(x)  # [1, C, n, w]
        classes = logits.shape[1]
        step = max(_WINDOW // (classes * (bottom - top) * stride**2) - 2, 1)
        parts = []
        for left in range(0, width, step):
            right = min(left + step, width)
            begin, end = max(left - 1, 0), min(right + 1, width)
            window = F.interpolate(
                logits[..., begin:end], scale_factor=stride, mode="bilinear", align_corners=False
            )
            window = window[
                0,
                :,
                (first - top) * stride : (last - top) * stride,
                (left - begin) * stride : (right - begin) * stride,
            ]
            if not torch.isfinite(window).all():
                raise WholePictureError("a logit is not finite")
            parts.append(window.argmax(0).to(torch.uint8 if classes <= 256 else torch.int32))
        return torch.cat(parts, dim=1)[:, :columns]


def _strongest(x: Tensor) -> Tensor:
    """The token [1, D] of largest norm among tokens [1, n, D]."""
    return x[:, x.norm(dim=-1).argmax(1)].squeeze(1)


def _picture(picture: Tensor | Picture) -> Picture:
    if isinstance(picture, np.ndarray):
        raise TypeError(
            "the picture is a NumPy array; give ArrayPicture(pixels, Normalisation(mean, std)) or a"
            " normalised tensor [C, H, W]"
        )
    if isinstance(picture, Tensor):
        return TensorPicture(picture)
    if not hasattr(picture, "channels"):
        raise TypeError(
            f"the picture is a {type(picture).__name__}; give a normalised tensor [C, H, W] or what"
            " open_picture returns for a file"
        )
    return picture


def _backbone(model: nn.Module) -> PlainBackbone:
    plain = model
    if isinstance(model, LinearSegmenter) and isinstance(model.maps, TokenMap):
        plain = model.maps.backbone
    if not isinstance(plain, PlainBackbone):
        raise TypeError(
            "model must be a plain backbone (Vittt, ViT³, Vim, Mamba-Reg, Vision-RWKV, a "
            f"linearised ViT) or a LinearSegmenter on one, got {type(model).__name__}"
        )
    return plain


def _plain(model: nn.Module) -> nn.Module:
    """A copy without composite ops, which has the tensors of the model itself."""
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return to_plain(copy.deepcopy(model, tensors))


def _banded(name: str, block: nn.Module) -> tuple[type[BandedBlock], ...]:
    for kinds in BANDED:
        if isinstance(block, kinds[0].kind):
            return kinds
    accepted = ", ".join(kinds[0].kind.__name__ for kinds in BANDED)
    raise WholePictureError(f"{name} is a {type(block).__name__}; in bands there are {accepted}")


def _digest(model: nn.Module) -> str:
    """SHA-256 of a model's structure and numbers."""
    found = hashlib.sha256(repr(model).encode())
    for name, x in model.state_dict().items():
        found.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
