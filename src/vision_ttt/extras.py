"""The optional packages of vision-ttt: which extra installs them, and an error that says so.

The extras are read from the metadata of the installed package, which pyproject.toml declares.
"""

import re
from importlib import metadata
from importlib.util import find_spec

from vision_ttt.errors import UserError

# Packages whose module has another name.
_MODULES = {
    "grad-cam": "pytorch_grad_cam",
    "openslide-python": "openslide",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
_REQUIREMENT = re.compile(r"(?P<package>[\w.-]+).*\bextra\s*==\s*['\"](?P<extra>[\w-]+)['\"]")


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


def require(extra: str, purpose: str) -> None:
    """Return if every package that an extra names is installed.

    Those of the extras that it builds on are not looked at. Nothing is known of the extras of a
    source tree that was not installed; there, the import that fails says what is missing.

    Args:
        extra: such as "train".
        purpose: what needs the packages, as the subject of the message.

    Raises:
        MissingPackageError: some are not installed; one line that says what to install.
    """
    missing = [name for name in _packages(extra) if find_spec(_module(name)) is None]
    if missing:
        raise MissingPackageError(
            f"{purpose} needs {', '.join(missing)}: pip install 'vision-ttt[{extra}]'"
        )


def _packages(extra: str) -> list[str]:
    try:
        requirements = metadata.requires("vision-ttt") or []
    except metadata.PackageNotFoundError:
        return []
    matches = filter(None, map(_REQUIREMENT.match, requirements))
    names = [match["package"] for match in matches if match["extra"] == extra]
    return [name for name in names if name != "vision-ttt"]


def _module(package: str) -> str:
    return _MODULES.get(package, package.replace("-", "_"))
