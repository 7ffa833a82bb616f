"""Text files as documents: which of them, which are held out, and reading them."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vision_ttt.data.shards import DatasetError
from vision_ttt.errors import DamagedItem, UserError
from vision_ttt.extras import require
from vision_ttt.file_kinds import UnreadableFile, check_regular, is_hidden, is_of_the_system

STDLIB = "stdlib"
"""In place of a folder: the sources of the Python that runs."""

LEFT_OUT_FOLDERS = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"),
)
"""Folders of the standard library that are left out: others' code, tests, applications, tables."""
_LARGEST = 2**40  # bytes of a file; more is none that a program wrote
_PIECE = 2**22
"""Bytes of a text file that are read at once; longer files come in pieces that end with a line."""
LEFT_OUT_FILES = "_sysconfigdata"
"""What the names of its generated files begin with: they say how this machine is set up."""


class DocumentError(DamagedItem):
    """A document that cannot be read, is no UTF-8 text, or lacks the requested field."""


@dataclass(frozen=True)
class Documents:
    """The files of a source, sorted by name."""

    root: Path
    """The folder that the names are relative to."""
    names: tuple[str, ...]
    """Paths relative to the root, with / as separator."""

    @property
    def digest(self) -> str:
        """SHA-256 of the names, in hexadecimal."""
        return _digest("\n".join(self.names)).hex()

    def held_out(self, share: float) -> tuple[Documents, Documents]:
        """Return the documents for training and those for test.

        The test documents are the `share` of all documents whose names have the smallest SHA-256,
        at least one. They are the same on every machine, and change little if files are added.

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

    def pieces(self, name: str, field: str = "text") -> Iterator[tuple[str, bool]]:
        """Yield the texts in a file, each with whether a document ends behind it.

        A file is a document, which comes in pieces where it is long. Of files .jsonl, .jsonl.zst
        and .parquet each row is a document, the text in its field.

        Raises:
            DocumentError: the file cannot be read, is no UTF-8, or a row has not the field.
            MissingPackageError: .zst and .parquet need the extra corpora.
        """
        path = self.root / name
        try:
            check_regular(path, _LARGEST)
            if is_of_the_system(path):
                raise UnreadableFile(path, "it is in /proc or /sys")
            if name.endswith(".parquet"):
                yield from _of_rows(path, _parquet_rows(path), field)
            elif name.endswith((".jsonl", ".jsonl.zst")):
                yield from _of_rows(path, _json_rows(path), field)
            else:
                yield from _of_text(path)
        except UnreadableFile as error:
            raise DocumentError(f"document {error}", str(path)) from error
        except OSError as error:
            raise DocumentError(
                f"document {path} cannot be read: {error.strerror or error}", str(path)
            ) from error

    def _those(self, names: Iterable[str]) -> Documents:
        return Documents(self.root, tuple(sorted(names)))


def find_documents(source: str, pattern: str) -> Documents:
    """Return the documents of a source.

    Args:
        source: a folder; or "stdlib": every .py file of `sysconfig.get_path("stdlib")`, except
            LEFT_OUT_FOLDERS at any depth, and LEFT_OUT_FILES.
        pattern: pattern of the files in the folder, as for `pathlib.Path.glob`, e.g. "**/*.txt";
            not used for "stdlib". Hidden files and folders are left out.

    Raises:
        DatasetError: the folder does not exist, the pattern is invalid, or no file matches it.
    """
    is_stdlib = source == STDLIB
    root = Path(sysconfig.get_path("stdlib") if is_stdlib else os.path.expanduser(source))
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


def _of_text(path: Path) -> Iterator[tuple[str, bool]]:
    decoder, rest, done = codecs.getincrementaldecoder("utf-8")(), "", 0
    with path.open("rb") as file:
        while True:
            block = file.read(_PIECE)
            waiting = len(decoder.getstate()[0])
            try:
                rest += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                place = done - waiting + error.start
                raise DocumentError(
                    f"document {path} is no UTF-8 text: byte {place} {error.reason}", str(path)
                ) from error
            if not block:
                yield rest, True
                return
            done += len(block)
            if len(block) == _PIECE:
                cut = rest.rfind("\n") + 1 or len(rest)
                yield rest[:cut], False
                rest = rest[cut:]


def _of_rows(path: Path, rows: Iterable[object], field: str) -> Iterator[tuple[str, bool]]:
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                raise DocumentError(
                    f"document {path}, row {number}: no text in {field!r}", str(path)
                )
            row[field].encode("utf-8")  # JSON may hold half a character, such as "\ud83d"
            yield row[field], True
    except UserError:
        raise
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"document {path}, row {number}: no UTF-8 text at character {error.start}", str(path)
        ) from error
    except Exception as error:  # what is no UTF-8 or no JSON; zstandard and pyarrow raise anything
        raise DocumentError(f"document {path}, after row {number}: {error}", str(path)) from error


def _json_rows(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        lines = file
        if path.suffix == ".zst":
            require("corpora", "reading .zst")
            import zstandard

            decompressor = zstandard.ZstdDecompressor()
            lines = io.BufferedReader(
                decompressor.stream_reader(file, read_across_frames=True), _PIECE
            )
        yield from (json.loads(line) for line in lines if line.strip())


def _parquet_rows(path: Path) -> Iterable[object]:
    require("corpora", "reading .parquet")
    from datasets import Dataset

    return Dataset.from_parquet(str(path), streaming=True)


def _is_chosen(name: str) -> bool:
    *folders, file = name.split("/")
    return not file.startswith(LEFT_OUT_FILES) and not set(folders) & set(LEFT_OUT_FOLDERS)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
