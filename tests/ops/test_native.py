"""Which library is loaded; where none is, what to run depends on where the package came from."""

import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vision_ttt.ops import _native
from vision_ttt.ops._native import install_command


class Distribution:
    def __init__(self, record):
        self.record = record

    def read_text(self, name):
        assert name == "direct_url.json"
        return self.record


@pytest.mark.parametrize(
    ("record", "source"),
    [
        (None, ["vision-ttt"]),
        ('{"url": "file:///a%20b/c", "dir_info": {"editable": true}}', ["--editable", "/a b/c"]),
        ('{"url": "file:///a%20b/c", "dir_info": {}}', ["/a b/c"]),
        (
            '{"url": "https://host/c.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}',
            ["git+https://host/c.git"],
        ),
        ('{"url": "https://host/c.tar.gz", "archive_info": {}}', ["https://host/c.tar.gz"]),
    ],
    ids=["index", "editable checkout", "checkout", "git", "archive"],
)
def test_install_command(record, source, monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution(record))
    options = ["-m", "pip", "install", "--force-reinstall", "--no-deps", "--no-cache-dir"]
    assert shlex.split(install_command()) == [sys.executable, *options, *source]


@pytest.mark.skipif(_native.LIBRARY is None, reason="not compiled")
def test_the_library_of_a_former_build_is_not_loaded(tmp_path, monkeypatch):
    """Former versions had Python's suffix in the name."""
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "ops" / "_native.py"))
    library = Path(_native.LIBRARY._name)
    (tmp_path / f"_kernels.cpython-311-x86_64-linux-gnu{library.suffix}").write_bytes(b"stale")
    assert _native._load() is None
    shutil.copy(library, tmp_path / library.name)
    assert _native._load()._name == str(tmp_path / library.name)


def test_a_damaged_library_is_reported_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "__file__", str(tmp_path / "ops" / "_native.py"))
    (tmp_path / f"_kernels{_native._SUFFIX}").write_bytes(b"short")
    with pytest.raises(ImportError, match=r"cannot be loaded.*pip install"):
        _native._load()


def test_install_command_of_sources_on_the_path(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    *_, option, folder = shlex.split(install_command())
    assert option == "--editable"
    assert (Path(folder) / "setup.py").exists()
