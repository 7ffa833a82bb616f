"""A `torch.export` program of PyTorch's operations as a graph of ONNX operators."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram

if TYPE_CHECKING:
    import onnx_ir


def translated(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: Sequence[Mapping[int, str]],
) -> torch.onnx.ONNXProgram:
    """The program in ONNX, with constants folded; :func:`tidy` removes what is left over.

    Args:
        program: of PyTorch's own operations.
        inputs, outputs: their names in the graph.
        axes: of each input the dynamic axes, and their names.
    """
    import onnx_ir.passes.common as passes
    from onnxscript.optimizer import fold_constants

    with _quietly(), torch.no_grad():
        found = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=tuple(dict(each) for each in axes),
            optimize=False,
        )
        passes.InlinePass()(found.model)
        fold_constants(found.model, onnx_shape_inference=True, should_fold=_is_of_weights)
    return found


def tidy(model: onnx_ir.Model) -> None:
    """Remove what is unused or there twice.

    The exporter's own optimisation also looks for patterns of operations, which takes more than a
    third of an export's time. onnxruntime runs the result no faster: it has patterns of its own.
    """
    import onnx_ir.passes.common as passes

    for simplify in (
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    ):
        simplify(model)


def _is_of_weights(node: onnx_ir.Node) -> bool | None:
    """Whether a node computes a part of packed weights; None for what is unknown."""
    import onnx_ir

    return True if node.outputs[0].dtype is onnx_ir.DataType.INT32 else None


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the translator's notes about its internals."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
