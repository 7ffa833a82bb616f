"""Export of a trained model as timm's folder, `torch.export` program or ONNX file, verified."""

from vision_ttt.export.inputs import ExportError, InputShapes, accepting_any_size
from vision_ttt.export.onnx_model import export_onnx
from vision_ttt.export.program import export_program
from vision_ttt.export.timm_folder import export_timm
from vision_ttt.export.verification import Agreement

__all__ = [
    "export_timm",
    "export_program",
    "export_onnx",
    "accepting_any_size",
    "InputShapes",
    "Agreement",
    "ExportError",
]
