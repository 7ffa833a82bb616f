"""Loading by transformers without running code of what is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import dynamic_module_utils


@contextmanager
def code_refused() -> Iterator[None]:
    """Keep transformers from asking whether to run a folder's code while the context is entered.

    ``trust_remote_code=False`` does not cover all of a load: some of the loaders that a folder's
    files name call others without it, and these ask on standard input. With no time to answer in,
    transformers refuses instead, by a ValueError.
    """
    former = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = former
