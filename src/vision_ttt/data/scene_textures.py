"""The scenes' surfaces: procedural textures of two colours, and what a camera adds to them."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

_OCTAVES = 4
_DRAWS = 20  # of a colour that is to be far from others
_SHADOW = 1.2  # pixels, its softness
_DULL = 0.06  # distance from grey, of each channel


def texture(
    height: int, width: int, colours: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Return a surface [height, width, 3] that goes from one colour to another in a random pattern.

    Args:
        colours: two, [2, 3], from 0 to 1.
    """
    pattern = generator.choice(_PATTERNS)(height, width, generator)
    return colours[0] + pattern[..., None] * (colours[1] - colours[0])


def dull_colours(contrast: float, generator: np.random.Generator) -> np.ndarray:
    """Return two colours [2, 3] near grey, which differ by `contrast` in a random direction."""
    grey = generator.uniform(0.05, 0.4)
    first = grey + generator.uniform(-_DULL, _DULL, 3)
    return _two(first, contrast, generator)


def vivid_colours(
    others: np.ndarray, distance: float, contrast: float, generator: np.random.Generator
) -> np.ndarray:
    """Return two colours [2, 3], the first one of any hue and far from grey.

    It is at least at `distance` from each of `others` [N, 3]; where twenty draws find none, it is
    the farthest of them. The second one is at `contrast` from it in a random direction.
    """
    hue = generator.uniform(0, 6, (_DRAWS, 1))
    saturation = generator.uniform(0.35, 0.8, (_DRAWS, 1))
    value = generator.uniform(0.8, 1.0, (_DRAWS, 1))
    # Of a hue in sixths of a circle each channel falls from 1 to 0 between its first and second.
    away = np.abs((hue - (0, 2, 4) + 3) % 6 - 3)
    drawn = value * (1 - saturation * np.clip(away - 1, 0, 1))
    apart = np.linalg.norm(drawn[:, None] - others, axis=-1).min(axis=1)
    far_enough = np.flatnonzero(apart >= distance)
    first = drawn[far_enough[0] if len(far_enough) else apart.argmax()]
    return _two(first, contrast, generator)


def _two(first: np.ndarray, contrast: float, generator: np.random.Generator) -> np.ndarray:
    direction = generator.normal(size=3)
    second = first + contrast * direction / np.linalg.norm(direction)
    return np.clip([first, second], 0, 1)


def draw_lines(surface: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return a surface [h, w, 3] with up to two bent lines, which belong to no class."""
    height, width = surface.shape[:2]
    image = _as_image(surface)
    draw = ImageDraw.Draw(image)
    for _ in range(generator.integers(0, 3)):
        points = generator.uniform(-0.1, 1.1, (3, 2)) * (width, height)
        share = np.linspace(0, 1, 16)[:, None]
        bent = (
            (1 - share) ** 2 * points[0]
            + 2 * share * (1 - share) * points[1]
            + share**2 * points[2]
        )
        colour = tuple(int(level) for level in generator.integers(0, 256, 3))
        thickness = int(generator.integers(1, max(2, width // 40) + 1))
        draw.line([tuple(point) for point in bent], fill=colour, width=thickness)
    return np.asarray(image, dtype=np.float32) / 255


def darkened_around(surface: np.ndarray, coverage: np.ndarray) -> np.ndarray:
    """Return a surface [h, w, 3] with the shadow of an object that lies on it.

    Args:
        coverage: the object's share of each pixel [h, w].
    """
    levels = Image.fromarray(np.rint(coverage * 255).astype(np.uint8))
    blurred = np.asarray(levels.filter(ImageFilter.GaussianBlur(_SHADOW)), dtype=np.float32) / 255
    return surface * (1 - np.minimum(2 * blurred, 0.9))[..., None]


def photograph(surface: np.ndarray, generator: np.random.Generator) -> Image.Image:
    """Return a surface [h, w, 3] as a picture: with blur, contrast, a cast and noise."""
    image = _as_image(surface)
    if generator.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(generator.uniform(0.3, 0.9)))
    levels = np.asarray(image, dtype=np.float32) / 255
    contrast = generator.uniform(0.75, 1.15)
    brightness = generator.uniform(-0.1, 0.1)
    cast = generator.uniform(0.92, 1.08, 3)
    noise = generator.uniform(0, 0.04) * generator.standard_normal(levels.shape)
    return _as_image((levels - 0.5) * contrast * cast + 0.5 + brightness + noise)


def _as_image(surface: np.ndarray) -> Image.Image:
    return Image.fromarray(np.rint(np.clip(surface, 0, 1) * 255).astype(np.uint8))


def smooth_noise(height: int, width: int, cells: int, generator: np.random.Generator) -> np.ndarray:
    """Smooth noise [h, w] from 0 to 1, with `cells` independent values along the longer side."""
    longer = max(height, width)
    rows, columns = (max(2, round(cells * side / longer) + 1) for side in (height, width))
    values = Image.fromarray(generator.random((rows, columns), dtype=np.float32))
    return np.asarray(values.resize((width, height), Image.Resampling.BICUBIC))


def _clouds(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    cells = generator.integers(2, 6)
    octaves = [smooth_noise(height, width, cells * 2**n, generator) / 2**n for n in range(_OCTAVES)]
    return _stretched(np.sum(octaves, axis=0))


def _grain(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    return smooth_noise(height, width, max(height, width) // 2, generator)


def _stripes(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    bent = generator.uniform(0, 4) * smooth_noise(height, width, 3, generator)
    return 0.5 + 0.5 * np.sin(_waves(height, width, generator) + bent)


def _checks(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    along = np.sin(_waves(height, width, generator))
    across = np.sin(_waves(height, width, generator))
    return 0.5 + 0.5 * np.tanh(4 * along * across)


def _slope(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    angle = generator.uniform(0, 2 * np.pi)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    return _stretched(rows * np.sin(angle) + columns * np.cos(angle))


def _waves(height: int, width: int, generator: np.random.Generator) -> np.ndarray:
    """The phase [h, w] of a plane wave of a random direction, 5 to 30 pixels long."""
    angle, length = generator.uniform(0, 2 * np.pi), generator.uniform(5, 30)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    phase = generator.uniform(0, 2 * np.pi)
    return 2 * np.pi / length * (rows * np.sin(angle) + columns * np.cos(angle)) + phase


def _stretched(values: np.ndarray) -> np.ndarray:
    low, high = values.min(), values.max()
    return (values - low) / max(high - low, 1e-6)


_PATTERNS = (_clouds, _grain, _stripes, _checks, _slope)
