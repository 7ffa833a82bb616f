"""How a backend is chosen: the call, the context manager, the environment, the op's preference."""

import os
import subprocess
import sys

import pytest

from vision_ttt.ops import _backend
from vision_ttt.ops._backend import resolve_backend, use_backend

REFUSALS = {"fast": lambda: "needs a moon", "slow": lambda: None, "slower": lambda: None}


@pytest.fixture(autouse=True)
def _no_override(monkeypatch):
    monkeypatch.setattr(_backend, "_override", None)


def test_the_first_that_can_serve_is_taken():
    assert resolve_backend("op", None, REFUSALS) == "slow"


def test_a_request_goes_before_an_override():
    with use_backend("slow"):
        assert resolve_backend("op", None, REFUSALS) == "slow"
        assert resolve_backend("op", "slower", REFUSALS) == "slower"


def test_overrides_nest_and_end():
    with use_backend("slower"):
        with use_backend(None):
            assert resolve_backend("op", None, REFUSALS) == "slow"
        assert resolve_backend("op", None, REFUSALS) == "slower"
        with pytest.raises(KeyError), use_backend("slow"):
            raise KeyError
        assert resolve_backend("op", None, REFUSALS) == "slower"
    assert resolve_backend("op", None, REFUSALS) == "slow"


def test_an_explicit_backend_that_cannot_serve_raises():
    message = r"op: backend 'fast' \(from {}\) cannot serve: needs a moon"
    with pytest.raises(ValueError, match=message.format("backend=")):
        resolve_backend("op", "fast", REFUSALS)
    with use_backend("fast"), pytest.raises(ValueError, match=message.format(r"use_backend\(\)")):
        resolve_backend("op", None, REFUSALS)


def test_no_backend_at_all():
    with pytest.raises(ValueError, match=r"no backend can serve this call: .*needs a moon"):
        resolve_backend("op", None, {"fast": REFUSALS["fast"]})


def test_the_environment_variable_overrides():
    code = "from vision_ttt.ops._backend import resolve_backend as r; r('op', None, {'a': None})"
    environment = os.environ | {"VISION_TTT_BACKEND": "nonsense"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert "unknown backend 'nonsense' (from the environment variable VISION_TTT" in run.stderr
