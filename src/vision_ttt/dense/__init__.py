"""Dense prediction: maps of several resolutions from a backbone, and the heads that use them."""

from typing import TYPE_CHECKING

from vision_ttt._lazy import lazy_exports

if TYPE_CHECKING:
    from vision_ttt.dense.backbone_weights import BackboneLoad, load_backbone
    from vision_ttt.dense.building import build_detector, build_segmenter
    from vision_ttt.dense.detector import Detector
    from vision_ttt.dense.model import DenseModel, DenseModelError
    from vision_ttt.dense.plain_encoder import TokenMap
    from vision_ttt.dense.pyramid_maps import PyramidMaps
    from vision_ttt.dense.segmenter import LinearSegmenter, Segmenter
    from vision_ttt.dense.sizes import DetectorSizes, SegmenterSizes
    from vision_ttt.dense.stage_maps import StageMaps
    from vision_ttt.dense.vit_adapter import ViTAdapter

__all__ = [
    "BackboneLoad",
    "DenseModel",
    "DenseModelError",
    "Detector",
    "DetectorSizes",
    "LinearSegmenter",
    "PyramidMaps",
    "Segmenter",
    "SegmenterSizes",
    "StageMaps",
    "TokenMap",
    "ViTAdapter",
    "build_detector",
    "build_segmenter",
    "load_backbone",
]

lazy_exports(
    __name__,
    {
        "BackboneLoad": "backbone_weights",
        "DenseModel": "model",
        "DenseModelError": "model",
        "Detector": "detector",
        "DetectorSizes": "sizes",
        "LinearSegmenter": "segmenter",
        "PyramidMaps": "pyramid_maps",
        "Segmenter": "segmenter",
        "SegmenterSizes": "sizes",
        "StageMaps": "stage_maps",
        "TokenMap": "plain_encoder",
        "ViTAdapter": "vit_adapter",
        "build_detector": "building",
        "build_segmenter": "building",
        "load_backbone": "backbone_weights",
    },
)
