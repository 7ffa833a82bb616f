"""How a backend is chosen: the call, the context manager, the environment, the op's preference."""

import ast
import os
import subprocess
import sys

import pytest

from vision_ttt.ops import _backend
from vision_ttt.ops._backend import AUTO, requested_backend, use_backend

REASONS = {"fast": "needs a moon", "slow": None, "slower": None}
REFUSALS = (REASONS, REASONS.get)


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.setattr(_backend, "_override", None)
    monkeypatch.setattr(_backend, "_outside", (None, ""))


def test_nobody_is_asked_for():
    assert requested_backend("op", None, *REFUSALS) == AUTO


def test_a_request_goes_before_an_override():
    with use_backend("slow"):
        assert requested_backend("op", None, *REFUSALS) == "slow"
        assert requested_backend("op", "slower", *REFUSALS) == "slower"


def test_overrides_nest_and_end():
    with use_backend("slower"):
        with use_backend(None):
            assert requested_backend("op", None, *REFUSALS) == AUTO
        assert requested_backend("op", None, *REFUSALS) == "slower"
        with pytest.raises(KeyError), use_backend("slow"):
            raise KeyError
        assert requested_backend("op", None, *REFUSALS) == "slower"
    assert requested_backend("op", None, *REFUSALS) == AUTO


def test_blocks_that_overlap_end_each_for_itself():
    """As two threads would have them: A in, B in, A out, B out."""
    first, second = use_backend("slow"), use_backend("slower")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert requested_backend("op", None, *REFUSALS) == "slower"
    second.__exit__(None, None, None)
    assert requested_backend("op", None, *REFUSALS) == AUTO


def test_an_explicit_backend_that_cannot_serve_raises():
    message = r"op: backend 'fast' \(from {}\) does not support this call: needs a moon"
    with pytest.raises(ValueError, match=message.format("backend=")):
        requested_backend("op", "fast", *REFUSALS)
    with use_backend("fast"), pytest.raises(ValueError, match=message.format(r"use_backend\(\)")):
        requested_backend("op", None, *REFUSALS)


@pytest.fixture(scope="module")
def fresh_process():
    """A process with an override that imports the package, then requests a backend."""
    code = "import sys, vision_ttt\nprint([m for m in sys.modules if m.startswith('vision_ttt')])\n"
    code += "vision_ttt.ops._backend.requested_backend('op', None, ['a'], None)"
    environment = os.environ | {"VISION_TTT_BACKEND": "dual"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_variable_overrides(fresh_process):
    assert fresh_process.returncode == 1
    message = "unknown backend 'dual' (from the environment variable VISION_TTT"
    assert message in fresh_process.stderr


def test_triton_kernels_are_not_imported_before_they_are_needed(fresh_process):
    imported = [name for name in ast.literal_eval(fresh_process.stdout) if ".triton_" in name]
    assert imported
    assert all(name.endswith(".triton_backend") for name in imported)
