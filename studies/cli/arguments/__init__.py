"""Each command's flags, and what it refuses first; see :mod:`vision_ttt.cli.main`."""
