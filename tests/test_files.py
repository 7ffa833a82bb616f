"""Files and folders are written and removed whole or not at all, on a full disk too."""

import errno
import os
from pathlib import Path

import pytest

from vision_ttt.files import remove_parts, write_bytes, write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "früher")
    write_text(path, "später")
    assert path.read_text(encoding="utf-8") == "später"
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("former", [b"good", None])
@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_full_disk_keeps_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, former: bytes | None, failing: str
) -> None:
    path = tmp_path / "weights"
    if former is not None:
        path.write_bytes(former)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_bytes(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == ([] if former is None else ["weights"])
    assert former is None or path.read_bytes() == former


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_bytes(tmp_path / "nowhere" / "file", b"")


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.safetensors.17.part").touch()
    (tmp_path / ".link.part").symlink_to(tmp_path)
    (tmp_path / "a.safetensors").touch()
    remove_parts(tmp_path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
