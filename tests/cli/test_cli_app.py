"""vision-ttt app: what it refuses at start."""

import socket
from pathlib import Path

import pytest

from vision_ttt.cli.main import main

Said = pytest.CaptureFixture[str]

pytest.importorskip("gradio", reason="the extra [app] is not installed")


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _refused(argv: list[str], capsys: Said) -> str:
    assert main(["app", *argv]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_wrong_arguments_are_told_in_a_line(tmp_path: Path, capsys: Said) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors at all, but long enough")
    for argv, told in (
        (["--port", "0"], "--port is 0; it must be at least 1"),
        (["missing.safetensors"], "No such file: missing.safetensors"),
        ([str(broken)], "broken.safetensors is truncated, corrupt or no safetensors file"),
        (["vittt_tiny_patch16"], "nearest: vittt_tiny_patch16_224"),
        (["--device", "tpu9"], "device 'tpu9' cannot be used"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--host", "192.168..1"], "cannot listen on 192.168..1"),
    ):
        assert told in _refused(["--port", _free_port(), *argv], capsys)


def test_a_taken_port_is_told(capsys: Said) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        told = _refused(["--port", str(port)], capsys)
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in told
