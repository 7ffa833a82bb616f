"""Whatever reads a file refuses named pipes, devices and files without an end, at once."""

import os
import pickle
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vision_ttt import recipes
from vision_ttt.convert.release import read_release
from vision_ttt.data.coco_reading import read_coco
from vision_ttt.data.documents import Documents
from vision_ttt.data.images import open_image
from vision_ttt.data.mask_folders import read_classes, read_labels
from vision_ttt.data.shards import ShardImages
from vision_ttt.data.sources import DatasetSpec, open_dataset
from vision_ttt.engine.tensor_files import inspect_tensors, read_tensors
from vision_ttt.errors import UserError
from vision_ttt.file_kinds import (
    UnreadableFile,
    as_text,
    check_files_in,
    check_regular,
    is_text,
    read_regular,
)

LARGEST = 2**41  # bytes of a file with nothing in it, which takes no room on the disk


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """A test that waits for ever fails."""

    def fail(*_: object) -> None:
        raise AssertionError("it hangs")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _endless(path: Path) -> None:
    path.symlink_to("/proc/self/maps")


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, LARGEST)


READERS: dict[str, Callable[[Path], object]] = {
    "instances.json": read_coco,
    "classes.txt": lambda path: read_classes(path.parent),
    "names.txt": lambda path: read_classes(path.parent, path),
    "a.webp": open_image,
    "a.png": lambda path: read_labels(path, ("a", "b")),
    "a.tar": lambda path: ShardImages([path]),
    "a.txt": lambda path: list(Documents(path.parent, ("a.txt",)).pieces("a.txt")),
    "a.yaml": lambda path: recipes.load(str(path)),
    "a.safetensors": read_tensors,
    "b.safetensors": inspect_tensors,
    "a.pth": read_release,
}


@pytest.mark.parametrize("made", [_pipe, _device, _folder, _huge])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(
    tmp_path: Path, name: str, made: Callable[[Path], None]
) -> None:
    made(tmp_path / name)
    with pytest.raises(UserError) as raised:
        READERS[name](tmp_path / name)
    if made is not _huge and name != "classes.txt":
        kinds = {_pipe: "a named pipe", _device: "a device", _folder: "a folder"}
        assert f"{name}" in str(raised.value)
        assert f"it is {kinds[made]}, not a file" in str(raised.value)


def test_class_names_beside_shards_must_be_a_file(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(b"")
        (tmp_path / f"{number}.cls").write_text(str(number % 2))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for path in sorted(tmp_path.glob("*.[pc]*")):
            tar.add(path, path.name)
    assert open_dataset(DatasetSpec(str(tmp_path))).classes == ("0", "1")
    _pipe(tmp_path / "classes.txt")
    with pytest.raises(UserError, match=r"classes\.txt cannot be read: it is a named pipe"):
        open_dataset(DatasetSpec(str(tmp_path)))


def test_a_class_index_of_a_shard_is_short(tmp_path: Path) -> None:
    """A sparse member of a tar file may claim any size."""
    (tmp_path / "0.png").write_bytes(b"")
    (tmp_path / "0.cls").write_text("0" * 101)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("0.png", "0.cls"):
            tar.add(tmp_path / name, name)
    with pytest.raises(UserError, match=r"0\.cls holds no class index: it has 101 bytes"):
        ShardImages([tmp_path / "a.tar"])


def test_folders_that_others_read_hold_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "gone").symlink_to("nothing")
    (tmp_path / "below").mkdir()
    check_files_in(tmp_path)
    _pipe(tmp_path / "tokenizer.json")
    with pytest.raises(UnreadableFile, match=r"tokenizer\.json cannot be read: it is a named pipe"):
        check_files_in(tmp_path)


def test_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc")
    assert read_regular(path, 3) == b"abc"
    check_regular(path)
    with pytest.raises(UnreadableFile, match=r"a\.txt cannot be read: it has 3 bytes; at most 2 "):
        read_regular(path, 2)
    _endless(tmp_path / "maps")
    with pytest.raises(UnreadableFile, match="it is in /proc or /sys"):
        read_regular(tmp_path / "maps", 2**20)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent", 3)


def test_worker_processes_can_send_the_error() -> None:
    error = pickle.loads(pickle.dumps(UnreadableFile("a.txt", "it is a folder, not a file")))
    assert str(error) == "a.txt cannot be read: it is a folder, not a file"
    assert error.reason == "it is a folder, not a file"


def test_names_as_text() -> None:
    name = os.fsdecode(b"caf\xe9")
    assert as_text(name) == "caf\ufffd"
    assert as_text("café") == "café"
    assert is_text("café")
    assert not is_text(name)
    assert not is_text("\ud800")
