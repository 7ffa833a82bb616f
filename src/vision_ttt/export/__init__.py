"""Export of a trained model for timm, `torch.export`, ONNX and OpenVINO, verified."""

from vision_ttt.export.extensions import onnxruntime_library, openvino_extension
from vision_ttt.export.inputs import ExportError, InputShapes, accepting_any_size
from vision_ttt.export.onnx_model import export_onnx
from vision_ttt.export.openvino_model import export_openvino
from vision_ttt.export.program import export_program
from vision_ttt.export.timm_folder import export_timm
from vision_ttt.export.verification import Agreement

__all__ = [
    "export_timm",
    "export_program",
    "export_onnx",
    "export_openvino",
    "openvino_extension",
    "onnxruntime_library",
    "accepting_any_size",
    "InputShapes",
    "Agreement",
    "ExportError",
]
