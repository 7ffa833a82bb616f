"""The sample pictures come with the packages."""

import socket

import pytest

from vision_ttt.app.samples import OTHERS, PHOTOGRAPHS, open_samples


def test_samples_are_there_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("samples are not fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    samples = open_samples()
    assert list(samples) == [*PHOTOGRAPHS, *OTHERS]
    assert all(picture.mode == "RGB" for picture in samples.values())
    assert samples["digit-3"].size == (32, 32)
