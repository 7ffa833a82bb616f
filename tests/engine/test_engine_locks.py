"""One run at a time in a folder, and no lock that outlives its process."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vision_ttt.engine import ConfigError, locks, train
from vision_ttt.engine.locks import LOCK_FILES, alone_in
from vision_ttt.recipes import change, resolve

Fields = Callable[..., dict]


def test_a_second_run_in_a_folder_is_refused(
    tiny_fields: Fields, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve(tiny_fields(epochs=1))
    run_dir = Path(config.run.output)
    with alone_in(run_dir, wait=False, lock=LOCK_FILES[1]):
        for way in ({}, {"resume": "auto"}, {"overwrite": True}):
            with pytest.raises(ConfigError, match=f"another run is at work in {run_dir}; .*--outp"):
                train(config, **way)
        assert [entry.name for entry in run_dir.iterdir()] == [LOCK_FILES[1]]
    # The lock is held while the run trains, and outlives what --overwrite sets aside.
    train(config)
    refused = []

    def second(*_: object) -> None:
        with pytest.raises(ConfigError, match="another run is at work"):
            train(change(config, {"seed": 1}), overwrite=True)
        refused.append(True)

    monkeypatch.setattr("vision_ttt.engine.metrics.memory_in_use", lambda _: second() or 1)
    train(config, overwrite=True)
    assert refused
    assert not (run_dir / "former" / LOCK_FILES[1]).exists()


def test_what_fails_before_it_begins_leaves_no_folder(tiny_fields: Fields, tmp_path: Path) -> None:
    outer = tmp_path / "some" / "where"
    for wrong in ({"image_size": 7}, {"arguments": {"depth": 0}}, {"batch_size": 10**20}):
        with pytest.raises(ConfigError):
            train(resolve(tiny_fields(output=str(outer / "run"), **wrong)))
    assert not (tmp_path / "some").exists()
    outer.mkdir(parents=True)
    with alone_in(outer / "run", wait=False):
        (outer / "run" / "kept").write_text("")
    assert (outer / "run" / "kept").exists()


def test_a_killed_process_leaves_no_lock_though_its_child_lives(tmp_path: Path) -> None:
    """A run's loader processes are such children."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with alone_in(tmp_path, wait=False):
            grandchild = os.fork()
            if grandchild:
                os.write(writing, str(grandchild).encode())
            time.sleep(100)
            os._exit(0)
    grandchild = int(os.read(reading, 20))
    try:
        with pytest.raises(BlockingIOError), alone_in(tmp_path, wait=False):
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.kill(grandchild, 0)  # it lives
        with alone_in(tmp_path, wait=False):
            pass
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_a_folder_that_its_former_holder_removed_is_made_again(tmp_path: Path) -> None:
    descriptor = locks._locked(tmp_path / "removed" / LOCK_FILES[0], wait=True)
    os.close(descriptor)
    assert (tmp_path / "removed" / LOCK_FILES[0]).exists()


def test_a_lock_of_a_file_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter((True, False))

    def removing(descriptor: int, path: Path, wait: bool) -> bool:
        if next(removals):
            path.unlink()  # by its former holder, between opening and locking
        return original(descriptor, path, wait)

    original = locks._lock
    monkeypatch.setattr(locks, "_lock", removing)
    with alone_in(tmp_path, wait=False):
        assert (tmp_path / LOCK_FILES[0]).exists()
        monkeypatch.undo()
        with pytest.raises(BlockingIOError), alone_in(tmp_path, wait=False):
            pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", without)
    with alone_in(tmp_path, wait=False):
        pass
    assert "cannot be locked" in caplog.text
