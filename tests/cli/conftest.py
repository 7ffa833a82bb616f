"""Which tests need the package of the extra [diffusion], and an output that nobody reads."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TextIO

import pytest

collect_ignore = ["test_cli_sample.py"] if find_spec("diffusers") is None else []


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """Make a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        yield output
