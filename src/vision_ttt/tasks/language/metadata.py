"""What the checkpoints of language models carry, and opening their documents again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision_ttt.data import DatasetError
from vision_ttt.engine.checkpoint import ModelMetadata
from vision_ttt.engine.config import ConfigError, MachineSection, TaskSection, TrainConfig
from vision_ttt.engine.described import check_number
from vision_ttt.tasks.language.config import CONTEXT, LanguageData
from vision_ttt.tasks.language.tokenizers import (
    BYTES,
    VOCABULARY,
    FolderTokenizer,
    Tokenizer,
    check_file_names,
    open_tokenizer,
)

if TYPE_CHECKING:
    from vision_ttt.tasks.language.task import Language


def check_carried(metadata: ModelMetadata) -> dict[str, Any]:
    """Return what a checkpoint carries, checked: its tokenizer's name and files, the vocabulary's
    size, the context.

    Raises:
        ValueError, TypeError, KeyError: it is damaged.
    """
    carried = metadata.carried
    if not isinstance(carried["tokenizer"], str):
        raise TypeError("tokenizer is not a name")
    files = carried.get("tokenizer_files", {})
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise TypeError("tokenizer_files must map names to texts")
    check_file_names(files)
    check_number("vocab_size", carried["vocab_size"], VOCABULARY, whole=True)
    if metadata.model_args["vocab_size"] != carried["vocab_size"]:
        raise ValueError("the number of tokens in the vocabulary does not fit")
    check_number("context", carried["context"], CONTEXT, whole=True)
    return carried


def carried_tokenizer(metadata: ModelMetadata) -> Tokenizer:
    """Return the tokenizer that a checkpoint's model was trained with.

    Raises:
        ConfigError: the checkpoint has its folder's name alone, and that is not there any more.
    """
    carried = check_carried(metadata)
    name, files = carried["tokenizer"], carried.get("tokenizer_files")
    if files:
        return FolderTokenizer.of_files(files)
    if name != BYTES and not Path(name).is_dir():
        raise ConfigError(
            f"the checkpoint does not hold its tokenizer, and the folder {name} that it names is"
            " not there; vision-ttt generate takes another one by --tokenizer"
        )
    return open_tokenizer(name)


def reopen(
    task: TaskSection,
    metadata: ModelMetadata,
    changes: Mapping[str, Any],
    *,
    part: str,
    precision: str,
    num_workers: int,
) -> Language:
    """Return the task of a checkpoint with its documents open, or with others.

    Args:
        task: its section.
        changes: fields of `LanguageData` that replace the checkpoint's.
        part: of the documents that becomes the test set: "test", "train" or "all".
        precision, num_workers: as in the section `machine`.

    Raises:
        DatasetError: the checkpoint holds no dataset and none is given; a change is of no field.
        ConfigError: the tokenizer is not there any more, or has another vocabulary.
    """
    from vision_ttt.tasks.language.task import Language

    tokenizer = carried_tokenizer(metadata)
    fields = {**metadata.data, **changes}
    if "dataset" not in fields:
        raise DatasetError("the checkpoint does not name its documents; give --dataset")
    if "dataset" in changes:
        fields.pop("validation", None)
    if fields["dataset"] == "stdlib":  # whose files no pattern chooses
        fields.pop("pattern", None)
    try:
        data = LanguageData(**{**fields, "tokenizer": metadata.carried["tokenizer"]})
    except TypeError as error:  # of another version, or a field that language does not have
        raise DatasetError(f"the data of a language model: {error}") from error
    machine = MachineSection(precision=precision, num_workers=num_workers)
    opened = Language(TrainConfig(task, data, machine=machine), tokenizer)
    opened.set_evaluation_data(metadata, part)
    return opened
