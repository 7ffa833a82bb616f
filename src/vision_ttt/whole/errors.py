"""The errors of whole pictures that whoever runs them can mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vision_ttt.errors import UserError


class WholePictureError(UserError, ValueError):
    """A picture, its scratch folder or the memory does not fit; the message says what would."""


@contextmanager
def naming(path: Path, kind: str) -> Iterator[None]:
    """Name the file in what goes wrong while another library reads it.

    Args:
        path: of the file.
        kind: which the library reads, such as "TIFF".

    Raises:
        WholePictureError: in the place of any error of the file's content.
    """
    try:
        yield
    except (WholePictureError, MemoryError):
        raise
    except Exception as error:  # of a file that anybody may have written, decoders raise anything
        if isinstance(error, OSError) and error.errno is not None:  # the system's
            raise
        reason = " ".join(str(error).split())
        raise WholePictureError(f"{path} cannot be read as {kind}: {reason}") from error
