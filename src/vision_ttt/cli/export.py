"""`vision-ttt export CHECKPOINT OUTPUT`."""

from pathlib import Path

import jsonargparse
from rich.console import Console

from vision_ttt.cli.main import CommandParser
from vision_ttt.engine import load_model
from vision_ttt.errors import UserError
from vision_ttt.export import (
    Agreement,
    InputShapes,
    accepting_any_size,
    export_onnx,
    export_program,
    export_timm,
)


def add_arguments(parser: CommandParser) -> None:
    """Declare the checkpoint, where it goes, and which images the result takes."""
    parser.add_argument("checkpoint", type=str, help="path of a last.safetensors")
    parser.add_argument(
        "output",
        type=str,
        help="its name tells the format: FILE.onnx, FILE.pt2 (torch.export), or a folder for timm"
        " and the Hugging Face hub (model.safetensors and config.json)",
    )
    parser.add_argument(
        "--batch_size",
        type=int | None,
        default=None,
        help="images per call of an .onnx or .pt2; null: any number",
    )
    parser.add_argument(
        "--dynamic_size",
        type=bool,
        default=False,
        help="take images of any height and width that are whole patches, in an .onnx or .pt2",
    )
    parser.add_argument(
        "--portable",
        type=bool,
        default=False,
        help="of a .pt2: PyTorch's operations only, so that it loads without vision_ttt; slower",
    )
    parser.add_argument(
        "--overwrite", type=bool, default=False, help="write though the output is there already"
    )


def run(arguments: jsonargparse.Namespace) -> int:
    """Export, run the result beside the checkpoint's model, and say how well they agree."""
    output = Path(arguments.output)
    _check(arguments, output)
    model, metadata = load_model(arguments.checkpoint)
    with Console(stderr=True).status(f"exporting {metadata.model}"):
        if output.suffix == "":
            agreement = export_timm(model, metadata, output)
        else:
            if arguments.dynamic_size:
                model = accepting_any_size(model, metadata)
            shapes = InputShapes.of(
                model,
                metadata.input["input_size"],
                batch_size=arguments.batch_size,
                dynamic_size=arguments.dynamic_size,
            )
            if output.suffix == ".onnx":
                agreement = export_onnx(model, metadata, output, shapes)
            else:
                agreement = export_program(
                    model, metadata, output, shapes, portable=arguments.portable
                )
    _show(output, metadata.model, agreement)
    return 0


def _check(arguments: jsonargparse.Namespace, output: Path) -> None:
    """Refuse what does not fit together before the work begins."""
    if output.suffix not in ("", ".onnx", ".pt2"):
        raise UserError(
            f"the output {output} must be a .onnx or .pt2 file, or a folder (a name without suffix)"
        )
    if output.exists() and not arguments.overwrite:
        raise UserError(f"{output} is there already; name another, or give --overwrite")
    if output.exists() and output.is_dir() != (output.suffix == ""):
        raise UserError(f"{output} is a {'folder' if output.is_dir() else 'file'}; name another")
    if not output.parent.is_dir():
        raise UserError(f"the folder {output.parent} does not exist")
    if arguments.portable and output.suffix != ".pt2":
        raise UserError(f"--portable is for a .pt2 file, not for {output}")
    if output.suffix == "" and (arguments.dynamic_size or arguments.batch_size is not None):
        raise UserError("--batch_size and --dynamic_size are for .onnx and .pt2 files")


def _show(output: Path, name: str, agreement: Agreement) -> None:
    console = Console()
    shapes = ", ".join(" × ".join(map(str, shape)) for shape in agreement.shapes)
    files = output.iterdir() if output.is_dir() else (output,)
    size = sum(file.stat().st_size for file in files) / 2**20
    console.print(f"{output}: {name}, {size:.1f} MiB", highlight=False, soft_wrap=True)
    console.print(
        f"ran beside the checkpoint's model on images {shapes}; largest difference"
        f" {agreement.difference:.1e} of the largest output",
        highlight=False,
        soft_wrap=True,
    )
