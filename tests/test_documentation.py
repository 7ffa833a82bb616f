"""The code that the documentation shows runs, and the links it has lead somewhere."""

import re
from pathlib import Path

import pytest
import timm
import torch

from vision_ttt import VitttBlock, VitttMixer
from vision_ttt.models.vittt_designs import DESIGNS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES += sorted((*ROOT.glob("src/**/README.md"), *ROOT.glob("studies/**/*.md")))
FINE_TUNING = ROOT / "docs/fine-tuning.md"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != FINE_TUNING and python_blocks(page)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python_blocks_run_one_after_the_other(page):
    if page.name == "language.md":
        pytest.importorskip("vision_ttt.language", exc_type=ImportError)
    names = {
        "model": timm.create_model("vittt_nano_patch4_32", num_classes=10, depth=2),
        "images": torch.zeros(1, 3, 32, 32),
    }
    for block in python_blocks(page):
        if "images" in block:  # of the model's size, whichever the page has made so far
            size = names["model"].pretrained_cfg["input_size"]
            names["images"] = torch.zeros(1, *size)
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.slow
def test_fine_tuning_gains_what_its_page_says(capsys):
    names = {}
    for block in python_blocks(FINE_TUNING):
        exec(compile(block, str(FINE_TUNING), "exec"), names)
    said = capsys.readouterr().out
    page = FINE_TUNING.read_text(encoding="utf-8")
    shown = re.search(r"^It prints.*?```\n(.*?)```", page, re.DOTALL | re.MULTILINE)[1]

    def shares(text):
        return [float(number) for number in re.findall(r"([\d.]+)%", text)]

    assert re.sub(r"[\d.]+%", "", said) == re.sub(r"[\d.]+%", "", shown)
    assert shares(said) == pytest.approx(shares(shown), abs=4)  # other machines round otherwise
    before, tuned, scratch = shares(said)
    assert tuned > max(before, scratch) + 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_the_documents_name_existing_code():
    """Paths and names in `code quotes` of the block's description."""
    text = (ROOT / "docs/how-a-vittt-block-works.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:layers|ops|models|tests)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / "src/vision_ttt" / path).exists(), path
    mixer = VitttMixer(32, 2)
    layers = (VitttBlock(mixer, 32, 64), mixer, mixer.ttt, mixer.ttt.learner)
    by_name = {type(layer).__name__: layer for layer in layers}
    mentions = re.findall(rf"`({'|'.join(by_name)})\.(\w+)`", text)
    assert mentions
    for owner, member in mentions:
        assert hasattr(by_name[owner], member), f"{owner}.{member}"
    for design in DESIGNS:
        assert f"`{design}`" in text
