"""How a segmenter sees an image at test: whole, or through windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vision_ttt.engine.evaluation import autocast
from vision_ttt.tasks.segmentation.sliding_window import sliding_logits


@dataclass(frozen=True)
class TestView:
    """What of an image the model is given at once; the fields are `SegmentationData`'s."""

    __test__ = False  # nothing that pytest collects

    evaluation: str
    """"whole" or "slide"."""
    window: int
    stride: int

    def segment(
        self, model: nn.Module, num_classes: int, precision: str
    ) -> Callable[[Tensor], Tensor]:
        """Return what makes an image [3, h, w] into its logits [C, h, w] float32."""

        def logits_of(images: Tensor) -> Tensor:
            with autocast(images.device, precision):
                return model(images).float()

        def whole(image: Tensor) -> Tensor:
            return logits_of(image[None])[0]

        def slide(image: Tensor) -> Tensor:
            return sliding_logits(
                logits_of, image, num_classes=num_classes, window=self.window, stride=self.stride
            )

        return torch.inference_mode()(slide if self.evaluation == "slide" else whole)
