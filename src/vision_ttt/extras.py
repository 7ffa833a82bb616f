"""The optional packages of vision-ttt: which extra installs them, and an error that says so.

The extras are read from the metadata of the installed package, which pyproject.toml declares.
"""

from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement

from vision_ttt.errors import UserError

# Packages whose module has another name.
_MODULES = {
    "grad-cam": "pytorch_grad_cam",
    "openslide-python": "openslide",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}


class MissingPackageError(UserError, ImportError):
    """An optional package is missing or too old; the message names the extra that installs it."""


def require(extra: str, purpose: str) -> None:
    """Return if every package that an extra names is installed, in a version that it accepts.

    Those of the extras that it builds on are not looked at. Nothing is known of the extras of a
    source tree that was not installed; there, the import that fails says what is missing.

    Args:
        extra: such as "train".
        purpose: what needs the packages, as the subject of the message.

    Raises:
        MissingPackageError: some are missing or too old; one line that says what to install.
    """
    needed = list(filter(None, map(_lacking, _requirements(extra))))
    if needed:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(needed)}: pip install 'vision-ttt[{extra}]'"
        )


def _requirements(extra: str) -> list[Requirement]:
    try:
        every = map(Requirement, metadata.requires("vision-ttt") or [])
    except metadata.PackageNotFoundError:
        return []
    optional = (each for each in every if each.marker and each.name != "vision-ttt")
    return [each for each in optional if each.marker.evaluate({"extra": extra})]


def _lacking(requirement: Requirement) -> str | None:
    """Return what is to be installed, for the message; None if the requirement is met."""
    name = requirement.name
    if find_spec(_MODULES.get(name, name.replace("-", "_"))) is None:
        return name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:  # a module on the path, of which nothing else is known
        return None
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{name}{requirement.specifier} ({version} is installed)"
