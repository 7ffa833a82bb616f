"""The kernels' sources: what stands where, and that both builds compile the same of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"

pytestmark = pytest.mark.skipif(not SOURCES.exists(), reason="there are no sources")


def test_only_one_folder_needs_tile_registers():
    needs = re.compile(
        r"VISION_TTT_TILES|VISION_TTT_AMX|__AMX|\btile(loadd|stored|zero|release)\b|ldtilecfg"
    )
    paths = [path for suffix in ("h", "cpp") for path in SOURCES.rglob(f"*.{suffix}")]
    found = {path.relative_to(SOURCES).parts[0] for path in paths if needs.search(path.read_text())}
    assert found == {"amx"}


def test_the_sanitized_build_compiles_what_the_package_s_does():
    setup, makefile = (ROOT / "setup.py").read_text(), (SOURCES / "Makefile").read_text()
    in_tiles = re.search(r'KERNELS_OF = \{\s*"amx": \((.*?)\)', setup, re.DOTALL)[1]
    of_setup = set(re.findall(r'"(\S+)/kernels.cpp"', in_tiles))
    of_makefile = set(re.search(r"addsuffix -amx,(.*)\)", makefile)[1].split())
    assert of_makefile == of_setup
    assert all((SOURCES / folder / "kernels.cpp").exists() for folder in of_setup)

    # The Makefile has a pattern for each depth.
    kernels = re.search(r"KERNELS := .*wildcard (.*?)\)", makefile)[1].split()
    headers = re.search(r"HEADERS := .*wildcard (.*?)\)", makefile)[1].split()
    for patterns, name in ((kernels, "kernels.cpp"), (headers, "*.h")):
        found = {path for pattern in patterns for path in SOURCES.glob(pattern)}
        assert found == set(SOURCES.rglob(name))
