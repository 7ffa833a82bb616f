"""What the page makes of an explanation and of an error, without a browser."""

import gradio as gr
import pytest
import torch
from PIL import Image

from vision_ttt.app.page import _moved, _shown, _with_shown_refusals
from vision_ttt.app.session import Explanation, Layer
from vision_ttt.data import ImageError

LAYERS = [Layer(f"block {n} of 2", norms=torch.rand(2, 3)) for n in (1, 2)]
SEEN = Explanation("vittt", Image.new("RGB", (30, 20)), {"cat": 0.5}, None, LAYERS, ["A note."])


def test_an_error_is_shown_as_text() -> None:
    """Its message is put into the page as HTML, and a visitor names the file."""

    def refuse() -> None:
        raise ImageError("<img src=x>\x1b.png", "it is damaged")

    with pytest.raises(gr.Error) as error:
        _with_shown_refusals(refuse)()
    assert "&lt;img src=x&gt;\\u001b.png" in error.value.message


@pytest.mark.parametrize(("chosen", "layer"), [(None, 2), (1, 1), (7, 2)])
def test_the_layer_is_the_chosen_one_or_the_last(chosen: int | None, layer: int) -> None:
    *_, slider, gradient, norms, losses = _shown(SEEN, chosen)
    assert slider.value == layer
    assert norms.label == f"Token norms: block {layer} of 2"
    assert [each.visible for each in (gradient, norms, losses)] == [False, True, False]


def test_the_slider_moves_to_a_layer() -> None:
    layer, _, norms, _ = _moved(SEEN, 1.0)
    assert (layer, norms.label) == (1, "Token norms: block 1 of 2")
    with pytest.raises(gr.Error, match="idle for too long"):
        _moved(None, 1.0)
