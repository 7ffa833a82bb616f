"""Which tests need the package of the extra [diffusion]."""

from importlib.util import find_spec

collect_ignore = ["test_cli_sample.py"] if find_spec("diffusers") is None else []
