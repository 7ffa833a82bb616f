"""Thin commands over the studies, made as those of :mod:`vision_ttt.cli`."""
