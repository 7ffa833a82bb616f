"""Webdataset shards to test with; and which tests need the packages of the extra [data]."""

import io
import tarfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

collect_ignore = []
if find_spec("webdataset") is None or find_spec("datasets") is None:
    collect_ignore.append("test_data_timm_readers.py")


@pytest.fixture
def write_shard() -> Callable[[Path, Iterable[tuple]], None]:
    """Write a tar of samples (key, image, class index as text); None leaves the member out.

    An image is the grey level of one, or the content of its file.
    """

    def write(path: Path, samples: Iterable[tuple[str, int | bytes | None, str | None]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for key, image, target in samples:
                content = _png(image) if isinstance(image, int) else image
                for suffix, data in (("cls", target and target.encode()), ("png", content)):
                    if data is not None:
                        member = tarfile.TarInfo(f"{key}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))

    return write


def _png(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (24, 24), (level,) * 3).save(buffer, "png")
    return buffer.getvalue()
