"""Errors of whole pictures that the user can fix."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vision_ttt.errors import UserError, reason_of


class WholePictureError(UserError, ValueError):
    """A picture, its scratch folder or the memory does not fit; the message says what would."""


@contextmanager
def naming(path: Path, kind: str) -> Iterator[None]:
    """Name the file in the errors that another library raises while it reads the file.

    Args:
        path: of the file.
        kind: the format that the library reads, such as "TIFF".

    Raises:
        WholePictureError: replaces any error about the content of the file.
    """
    try:
        yield
    except (WholePictureError, MemoryError):
        raise
    except Exception as error:  # decoders may raise any exception for an untrusted file
        if isinstance(error, OSError) and error.errno is not None:  # from the operating system
            raise
        raise WholePictureError(f"{path} cannot be read as {kind}: {reason_of(error)}") from error
