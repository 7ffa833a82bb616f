"""Thin commands over the library; `vision_ttt.cli.main` dispatches."""
