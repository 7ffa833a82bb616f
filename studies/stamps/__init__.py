"""Photographs of things, cut out, on other photographs: dense labels on real pixels."""

from pathlib import Path

RECIPE = Path(__file__).parent / "stamps.yaml"
"""Trains a segmenter of them."""
