"""Each command's flags, and what it refuses first. Free of PyTorch, see `cli.main`."""
