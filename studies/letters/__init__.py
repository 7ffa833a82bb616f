"""Rendered pictures of letters: a task for high resolution without a download."""

from pathlib import Path

RECIPE = Path(__file__).parent / "letters.yaml"
"""Trains a segmenter of them."""
WEIGHTS = Path(__file__).parent / "weights"
"""Folder of such segmenters, MODEL.letters.safetensors, with a card each."""
