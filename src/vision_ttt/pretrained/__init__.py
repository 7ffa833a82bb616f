"""Weights that come with the package, by name: `MODEL.TAG.safetensors` and a model card each.

The card, `MODEL.TAG.md`, says what they were trained on, how, what they reach and what not.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
_SUFFIX = ".safetensors"


def list_pretrained() -> list[str]:
    """The sorted names of all packaged weights, each `MODEL.TAG`."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in FOLDER.glob(f"*{_SUFFIX}"))


def pretrained_of(model: str) -> list[str]:
    """The sorted names of a model's packaged weights."""
    return [name for name in list_pretrained() if name.partition(".")[0] == model]


def weights_path(given: str) -> str:
    """The path of packaged weights where `given` is their name, else `given` itself."""
    return str(FOLDER / f"{given}{_SUFFIX}") if given in list_pretrained() else given
