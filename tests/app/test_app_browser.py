"""The page in a real browser, from upload to maps, wide and as wide as a phone.

Screenshots are kept in the folder that the environment variable VISION_TTT_SCREENSHOTS names, or
in pytest's temporary one.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from vision_ttt.app.catalogue import Catalogue, LoadedModel
from vision_ttt.app.page import build_page, serve
from vision_ttt.app.session import Explanation, explain
from vision_ttt.app.uploads import LARGEST_FILE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="neither chromium-headless-shell nor chromium is installed"
    ),
]

WIDE, NARROW = (1280, 900), (390, 844)
PATIENCE = 60_000  # ms


@pytest.fixture(scope="module")
def catalogue(classifier: Path, segmenter: Path) -> Catalogue:
    return Catalogue([str(classifier), str(segmenter)])


@pytest.fixture(scope="module")
def address(catalogue: Catalogue) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    page = build_page(catalogue)
    serve(page, "127.0.0.1", port)
    yield f"http://127.0.0.1:{port}"
    page.close(verbose=False)


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as engine:
        # Chromium's sandbox does not run as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


Visit = Callable[..., "playwright.Page"]


@pytest.fixture
def visit(browser: "playwright.Browser", address: str) -> Iterator[Visit]:
    """Open the page in a session of its own; it must log no error and ask no one else."""
    contexts, wrong = [], []

    def note_request(request: "playwright.Request") -> None:
        host = urlsplit(request.url).hostname
        if host not in (None, "127.0.0.1"):  # data: and blob: have none
            wrong.append(f"request to {host}: {request.url}")

    def opened(size: tuple[int, int] = WIDE, *, refused: bool = False) -> "playwright.Page":
        context = browser.new_context(viewport={"width": size[0], "height": size[1]})
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        page.on("request", note_request)
        page.on("pageerror", lambda error: wrong.append(f"exception: {error}"))
        page.on(
            "console",
            lambda message: (
                wrong.append(f"{message.type}: {message.text} {message.location}")
                if message.type == "error"
                else None
            ),
        )
        page.goto(address)
        page.locator("#samples img").first.wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def keep(tmp_path: Path) -> Callable[["playwright.Page", str], None]:
    """Keep a screenshot of the whole page."""
    folder = Path(os.environ.get("VISION_TTT_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def shoot(page: "playwright.Page", name: str) -> None:
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return shoot


def _upload(page: "playwright.Page", path: Path) -> None:
    page.locator("#file input[type=file]").set_input_files(path)


def _picture(page: "playwright.Page", name: str) -> str:
    """The address of a shown picture, when it is there and drawn."""
    image = page.locator(f"#{name} img")
    image.wait_for()
    page.wait_for_function(
        "name => document.querySelector(`#${name} img`).naturalWidth > 0", arg=name
    )
    return image.get_attribute("src")


def _choose(page: "playwright.Page", name: str, value: str) -> None:
    page.locator(f"#{name} input").click()
    page.get_by_role("option", name=value, exact=True).click()


@pytest.fixture
def photo(tmp_path: Path, pictures: list[Image.Image]) -> Path:
    path = tmp_path / "photo.png"
    pictures[0].resize((400, 240)).save(path)
    return path


def test_a_visitor_uploads_sees_and_moves_the_slider(
    visit: Visit, photo: Path, catalogue: Catalogue, keep: Callable
) -> None:
    page = visit()
    _upload(page, photo)
    shown = {name: _picture(page, f"first-{name}") for name in ("gradient", "norms", "losses")}
    expected = explain(catalogue.load(catalogue.names[0]), Image.open(photo).convert("RGB"))
    best, probability = next(iter(expected.classes.items()))
    classes = page.locator("#first-classes").inner_text()
    assert best in classes
    assert f"{probability:.0%}" in classes
    assert "block 2 of 2" in page.locator("#first-gradient").inner_text()

    slider = page.locator("#first-layer input[type=range]")
    slider.focus()
    slider.press("ArrowLeft")
    page.locator("#first-gradient", has_text="block 1 of 2").wait_for()
    moved = {name: _picture(page, f"first-{name}") for name in shown}
    assert all(moved[name] != shown[name] for name in shown)

    assert not page.locator("#second-gradient").is_visible()
    _choose(page, "second", catalogue.names[1])
    _picture(page, "second-gradient")
    _picture(page, "second-seen")
    assert "block 4 of 4" in page.locator("#second-gradient").inner_text()
    assert page.locator("#first-gradient").is_visible()
    keep(page, "wide")


def test_a_model_looks_once_when_it_is_chosen(
    visit: Visit, photo: Path, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def noted(loaded: LoadedModel, *others: object) -> Explanation:
        looked.append(loaded.name)
        return explain(loaded, *others)

    monkeypatch.setattr("vision_ttt.app.page.explain", noted)
    page = visit()
    _upload(page, photo)
    _picture(page, "first-gradient")
    _choose(page, "second", catalogue.names[1])
    _picture(page, "second-gradient")
    page.locator("#second input").click()  # into the list and out of it, without a choice
    page.locator("#second input").press("Escape")
    page.locator("#second input").blur()
    _choose(page, "second", "nothing")  # computed last: one look runs after the other
    page.locator("#second-gradient").wait_for(state="hidden")
    assert looked == list(catalogue.names[:2])


def test_a_phone_shows_it_without_scrolling_sideways(visit: Visit, keep: Callable) -> None:
    page = visit(NARROW)
    page.locator("#samples button").nth(1).click()
    for name in ("seen", "gradient", "norms", "losses"):
        _picture(page, f"first-{name}")
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= NARROW[0]
    box = page.locator("#first-gradient img").bounding_box()
    assert box["width"] > 250
    keep(page, "narrow")


def test_what_cannot_be_shown_is_told(visit: Visit, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_text("no picture at all")
    page = visit()
    _upload(page, broken)
    page.get_by_text("cannot decode image broken.png").wait_for()
    assert not page.locator("#first-gradient").is_visible()
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    page = visit(refused=True)
    _upload(page, large)
    page.get_by_text('exceed the maximum allowed size of 20.0 Mb: "large.png"').wait_for()


def test_visitors_at_once_see_their_own_pictures(
    visit: Visit, tmp_path: Path, pictures: list[Image.Image], catalogue: Catalogue
) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, picture in zip(paths, pictures, strict=False):
        picture.save(path)
    pages = [visit() for _ in paths]
    for page, path in zip(pages, paths, strict=True):
        _upload(page, path)
    for page, picture in zip(pages, pictures, strict=False):
        _picture(page, "first-gradient")
        expected = explain(catalogue.load(catalogue.names[0]), picture).classes
        shown = page.locator("#first-classes").inner_text()
        assert all(f"{value:.0%}" in shown for value in expected.values())
