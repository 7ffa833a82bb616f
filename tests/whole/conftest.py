"""Tests of readers whose libraries are not installed are left out."""

from importlib.util import find_spec

_LIBRARIES = {"raster": "rasterio", "slides": "openslide", "zarr_store": "zarr"}

collect_ignore = [
    f"test_{module}.py" for module, library in _LIBRARIES.items() if find_spec(library) is None
]
