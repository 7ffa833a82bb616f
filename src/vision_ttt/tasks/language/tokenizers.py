"""Between text and tokens: bytes, or a tokenizer of transformers."""

from __future__ import annotations

import codecs
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from vision_ttt.engine.config import ConfigError
from vision_ttt.engine.section import Range, check_number
from vision_ttt.errors import UserError, reason_of
from vision_ttt.file_kinds import check_files_in

BYTES = "bytes"
"""Name of the tokenizer that needs no vocabulary."""
_ANY_BYTE = "surrogateescape"
"""Error handler of UTF-8 by which any bytes become text, and the same bytes again."""
_FILE_NAME = re.compile(r"(?!config\.json)\w[\w.-]*\.(json|txt|model|spm|codes|tiktoken|jinja)")
"""Of a file of a tokenizer: it stays within its folder, and is neither a module nor a model's."""
VOCABULARY = Range(1, 1 << 24, f"from 1 to {1 << 24:,}")
"""Tokens; more is a damaged file rather than a language's words."""


class Tokenizer(ABC):
    """Text as token ids below `vocab_size`, of which `end` ends a document and begins the next."""

    vocab_size: int
    end: int

    def files(self) -> dict[str, str]:
        """Return what it is made of, for checkpoints: file's name → text. None by default."""
        return {}

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text [T], without `end`."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no UTF-8 is shown as U+FFFD, `end` as nothing."""

    @abstractmethod
    def stream(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Return a function that decodes one token after the other, after those of a prompt.

        It returns the text that each token adds, or "" while a character is incomplete. Called with
        None at the end, it returns the rest.
        """


class ByteTokenizer(Tokenizer):
    """Bytes of UTF-8 and 256, a document's end."""

    vocab_size = 257
    end = 256

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode("utf-8", _ANY_BYTE), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", "replace")

    def stream(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Return a decoder that waits for whole characters; the prompt has no effect on it.

        A prompt is a text, so that its last character is complete and no byte is pending.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def text_of(token: int | None) -> str:
            if token is None:
                return decoder.decode(b"", final=True)
            return decoder.decode(bytes([token])) if token < self.end else ""

        return text_of


class FolderTokenizer(Tokenizer):
    """A tokenizer that transformers reads from a folder; its code, where it has any, is not run."""

    def __init__(self, folder: str) -> None:
        """Read it.

        Raises:
            ConfigError: the folder holds none, or it has no end-of-sequence token.
        """
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        from vision_ttt.tasks.language.code_refusal import code_refused

        folder = os.path.expanduser(folder)
        if not Path(folder).is_dir():
            raise ConfigError(
                f"tokenizer is {folder!r}; it must be {BYTES!r} or the folder of a tokenizer of"
                " transformers"
            )
        check_files_in(Path(folder))
        try:
            with code_refused():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
        # Tokenizers of many kinds, some of them not in Python, raise anything.
        except Exception as error:
            raise ConfigError(f"tokenizer {folder} cannot be read: {reason_of(error)}") from error
        if not isinstance(self._tokenizer, PreTrainedTokenizerBase):
            kind = type(self._tokenizer).__name__
            raise ConfigError(f"tokenizer {folder} cannot be read: it holds a {kind}")
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"tokenizer {folder} has no end-of-sequence token, which is to end documents"
            )
        # Ids may have gaps.
        last = max(self._tokenizer.get_vocab().values(), default=-1)
        self.vocab_size = max(len(self._tokenizer), last + 1)
        # Before it is saved, which takes memory for each id.
        check_number(f"the vocabulary of tokenizer {folder}", self.vocab_size, VOCABULARY)
        self.end = self._tokenizer.eos_token_id

    @classmethod
    def of_files(cls, files: Mapping[str, str]) -> FolderTokenizer:
        """Return the tokenizer whose :meth:`files` are given.

        Raises:
            ConfigError: they are those of none, or a name is none that a tokenizer's file has.
        """
        check_file_names(files)
        with TemporaryDirectory(prefix="tokenizer-") as folder:
            for name, text in files.items():
                (Path(folder) / name).write_bytes(text.encode("utf-8", _ANY_BYTE))
            return cls(folder)

    def files(self) -> dict[str, str]:
        """Return the files that transformers saves of it; bytes that are no text are escaped.

        Raises:
            ConfigError: it consists of files that a checkpoint cannot carry.
        """
        with TemporaryDirectory(prefix="tokenizer-") as folder:
            saved = self._tokenizer.save_pretrained(folder)
            paths = sorted({Path(path) for path in saved if Path(path).is_file()})
            check_file_names(path.name for path in paths)
            return {path.name: path.read_bytes().decode("utf-8", _ANY_BYTE) for path in paths}

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, without special ones.

        Raises:
            UserError: it holds bytes that are no UTF-8, which such a tokenizer cannot read, or the
                tokenizer has no token for a part of it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text is no UTF-8 at character {error.start}, "
                f"{text[error.start]!r}; the tokenizer accepts only UTF-8"
            ) from error
        # Documents are longer than what the tokenizer's own model takes at once; ours packs them.
        try:
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # as on reading it
            raise UserError(f"the tokenizer cannot read the text: {error}") from error
        return np.asarray(tokens, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        kept = [token for token in tokens if token != self.end]
        return self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)

    def stream(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Return a decoder of the last tokens; what was returned before is left out.

        It goes on from the prompt: some tokenizers write no space before a text's first word.
        """
        tokens = list(prompt)
        first, shown = 0, len(tokens)  # decoding all tokens each time would be quadratic

        def text_of(token: int | None) -> str:
            nonlocal first, shown
            if token is not None:
                tokens.append(token)
            before, text = (self.decode(tokens[first:end]) for end in (shown, None))
            added = text[len(before) :]
            # A part of a character, which some tokenizers write as nothing.
            if token is not None and (not added or added.endswith("\ufffd")):
                return ""
            first, shown = shown, len(tokens)
            return added

        return text_of


def check_file_names(files: Iterable[str]) -> None:
    """Raise ConfigError unless each is a plain name that a tokenizer's file may have."""
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise ConfigError(f"the tokenizer's file {name!r} cannot be stored in a checkpoint")


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a name: "bytes", or the folder of one of transformers.

    Raises:
        ConfigError: the folder holds none.
    """
    return ByteTokenizer() if name == BYTES else FolderTokenizer(name)
