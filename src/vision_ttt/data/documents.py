"""Text files as documents: which of them, which are held out, and reading them."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vision_ttt.data.shards import DatasetError
from vision_ttt.errors import DamagedItem
from vision_ttt.file_kinds import UnreadableFile, is_hidden, read_regular

STDLIB = "stdlib"
"""In place of a folder: the sources of the Python that runs."""

LEFT_OUT_FOLDERS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"),
)
"""Of the standard library: what others wrote, tests, applications, and files that are tables."""
_LARGEST = 2**32  # bytes of a document, which is read whole
LEFT_OUT_FILES = "_sysconfigdata"
"""What the names of its generated files begin with: they say how this machine is set up."""


class DocumentError(DamagedItem):
    """A document that cannot be read, or is no UTF-8 text."""


@dataclass(frozen=True)
class Documents:
    """The files of a source, by their names in the order of these."""

    root: Path
    """Folder that the names begin at."""
    names: tuple[str, ...]
    """Paths from the root on, with / between."""

    def held_out(self, share: float) -> tuple[Documents, Documents]:
        """Return the documents for training and those for test.

        Test are the `share` of all whose names have the least SHA-256, at least one: so the same on
        every machine, and little else where files are added.

        Raises:
            DatasetError: none would be left for training.
        """
        count = max(1, round(share * len(self.names)))
        if count >= len(self.names):
            raise DatasetError(
                f"{self.root} has {len(self.names)} documents, of which {count} would be held out"
                f" (test_share {share:g}); at least one more is needed"
            )
        test = set(sorted(self.names, key=_digest)[:count])
        return self._those(n for n in self.names if n not in test), self._those(test)

    def read(self, name: str) -> str:
        """Return the text of a document, its line ends as they are.

        Raises:
            DocumentError: the file cannot be read, is too large, or is no UTF-8.
        """
        path = self.root / name
        try:
            return read_regular(path, _LARGEST).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"document {path} is no UTF-8 text: byte {error.start} {error.reason}", str(path)
            ) from error
        except UnreadableFile as error:
            raise DocumentError(f"document {error}", str(path)) from error
        except OSError as error:
            raise DocumentError(
                f"document {path} cannot be read: {error.strerror}", str(path)
            ) from error

    def _those(self, names: Iterable[str]) -> Documents:
        return Documents(self.root, tuple(sorted(names)))


def find_documents(source: str, pattern: str) -> Documents:
    """Return the documents of a source.

    Args:
        source: a folder; or "stdlib": every .py file of `sysconfig.get_path("stdlib")` but those of
            LEFT_OUT_FOLDERS, wherever these are in it, and LEFT_OUT_FILES.
        pattern: of the files in the folder, as `pathlib.Path.glob` has it, e.g. "**/*.txt"; not
            used for "stdlib". Hidden files and folders are left out.

    Raises:
        DatasetError: there is no such folder, the pattern is none, or no file is of that pattern.
    """
    is_stdlib = source == STDLIB
    root = Path(sysconfig.get_path("stdlib") if is_stdlib else source)
    if not root.is_dir():
        raise DatasetError(f"the documents' folder {root} does not exist")
    try:
        found = [path for path in root.glob("**/*.py" if is_stdlib else pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise DatasetError(f"pattern {pattern!r}: {error}") from error
    inside = [path.relative_to(root) for path in found]
    names = [path.as_posix() for path in inside if not is_hidden(path)]
    if is_stdlib:
        names = [name for name in names if _is_chosen(name)]
    if not names:
        wanted = "sources" if is_stdlib else f"files of the pattern {pattern!r}"
        raise DatasetError(f"{root} holds no {wanted}")
    return Documents(root, tuple(sorted(names)))


def _is_chosen(name: str) -> bool:
    *folders, file = name.split("/")
    return not file.startswith(LEFT_OUT_FILES) and not set(folders) & set(LEFT_OUT_FOLDERS)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
