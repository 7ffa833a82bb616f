"""What each command takes: its flags and the first refusals. Free of PyTorch, see `cli.main`."""
