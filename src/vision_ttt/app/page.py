"""The page itself: what is on it, and what happens when a visitor touches it.

All values that belong to a visitor are in `gr.State`, which each browser tab has for itself.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import gradio as gr
from PIL import Image

from vision_ttt.app.catalogue import Catalogue
from vision_ttt.app.pictures import enlarged, heat_map, loss_curves
from vision_ttt.app.samples import open_samples
from vision_ttt.app.session import Explanation, explain
from vision_ttt.app.uploads import LARGEST_FILE, open_upload
from vision_ttt.errors import UserError
from vision_ttt.explain.gradient_maps import DEFAULT_STATE
from vision_ttt.shown_text import shown

_INTRODUCTION = """# What a model sees
Choose a picture and a model. A layer of test-time training learns the picture while it reads it.
The maps show where its inner models can learn most, and the norms of the tokens."""
_GRADIENTS = {
    "before any step": "initial",
    "after the whole picture": "final",
    "before each mini-batch": "current",
}
_ABOUT_GRADIENTS = (
    "The state of the inner models at which gradients are taken. 'After the whole picture' gives"
    " the clearest maps of large pictures. 'Before each mini-batch' is the paper's definition;"
    " there the first tokens of a scan have the largest values, since the inner model is"
    " still untrained."
)
_NOTHING = "nothing"
_SEEN = "Input of the model"
_NAMES = {
    "gradient": "Gradient magnitude",
    "norms": "Token norms",
    "losses": "Inner loss along the scan",
}
_LEAST_WIDTH = 240  # pixels of a picture before it moves to the next line

_KEPT_SECONDS = 3600  # a visitor's picture and results, and the files of shown pictures
_MOST_VISITORS = 100  # whose results are kept at once
_MOST_WAITING = 64  # computations
# A block's label stands above its picture, not on it; thumbnails fill the width that there is.
_CSS = """
.gradio-container { max-width: 1180px !important; margin: auto; }
.gradio-container label[data-testid="block-label"] { position: static; border: none; }
#samples .grid-wrap { height: auto; min-height: 0; max-height: none; overflow: visible; }
#samples .grid-container {
  grid-template: none / repeat(auto-fill, minmax(76px, 1fr));
  grid-auto-rows: auto;
  padding: 0;
}
#samples .thumbnail-item { height: auto; aspect-ratio: 1; }
#samples .caption-label { font-size: 11px; padding: 1px 4px; }
.shown img { width: 100% !important; height: auto !important; max-height: 440px; }
"""


@dataclass(frozen=True)
class _Side:
    """The components that show what one model sees."""

    chosen: gr.State
    """The layer that the visitor moved the slider to, from 1; None for the last one."""
    column: gr.Column
    explanation: gr.State
    """The visitor's."""
    heading: gr.Markdown
    seen: gr.Image
    classes: gr.Label
    layer: gr.Slider
    gradient: gr.Image
    norms: gr.Image
    losses: gr.Image

    @property
    def outputs(self) -> list[Any]:
        """What an explanation changes, in the order of the fields."""
        return [getattr(self, each.name) for each in fields(self) if each.name != "chosen"]


def build_page(catalogue: Catalogue) -> gr.Blocks:
    """Return the page that offers a catalogue's models."""
    samples = open_samples()
    with gr.Blocks(
        title="What a model sees",
        analytics_enabled=False,
        delete_cache=(_KEPT_SECONDS, _KEPT_SECONDS),
    ) as page:
        gr.Markdown(_INTRODUCTION)
        picture = gr.State(None, time_to_live=_KEPT_SECONDS)
        with gr.Row():
            with gr.Column(min_width=300):
                file = gr.File(
                    label=f"Your picture, at most {LARGEST_FILE >> 20} MB",
                    file_types=["image"],
                    height=140,
                    elem_id="file",
                )
                gallery = gr.Gallery(
                    [(sample, name) for name, sample in samples.items()],
                    label="or one of these",
                    columns=6,
                    height="auto",
                    object_fit="cover",
                    allow_preview=False,
                    buttons=[],
                    interactive=False,
                    elem_id="samples",
                )
            with gr.Column(min_width=300):
                first = gr.Dropdown(list(catalogue.names), label="Model", elem_id="first")
                second = gr.Dropdown(
                    [_NOTHING, *catalogue.names],
                    value=_NOTHING,
                    label="Second model",
                    elem_id="second",
                )
                state = gr.Radio(
                    list(_GRADIENTS.items()),
                    value=DEFAULT_STATE,
                    label="Gradients of the inner learners",
                    info=_ABOUT_GRADIENTS,
                    elem_id="state",
                )
        with gr.Row():
            left = _side("first")
            right = _side("second")

        def take_sample(event: gr.SelectData) -> Image.Image:
            return list(samples.values())[event.index]

        def look(
            picture: Image.Image | None, model: str, state: str, chosen: int | None
        ) -> Sequence[Any]:
            if model == _NOTHING:
                return [gr.Column(visible=False), None, *[gr.skip()] * (len(left.outputs) - 2)]
            if picture is None:
                return [gr.skip()] * len(left.outputs)
            return _shown(explain(catalogue.load(model), picture, state), chosen)

        looks = [
            {
                "fn": _with_shown_refusals(look),
                "inputs": [picture, model, state, side.chosen],
                "outputs": side.outputs,
                # In the order in which they were asked for, so that what is shown is the latest.
                "concurrency_id": "look",
                "concurrency_limit": 1,
                "api_visibility": "private",
            }
            for model, side in ((first, left), (second, right))
        ]
        private = {"api_visibility": "private"}
        uploaded = file.upload(_with_shown_refusals(open_upload), file, picture, **private)
        chosen = gallery.select(take_sample, None, picture, **private)
        for event in (uploaded, chosen, state.input(lambda: None, **private)):
            event.success(**looks[0]).success(**looks[1])
        # A dropdown's input comes twice: when an option is chosen, and when it gives up the focus.
        first.change(**looks[0])
        second.change(**looks[1])
        for side in (left, right):
            side.layer.input(
                _moved,
                [side.explanation, side.layer],
                [side.chosen, side.gradient, side.norms, side.losses],
                show_progress="hidden",
                trigger_mode="always_last",
                concurrency_limit=None,
                **private,
            )
    return page


def serve(page: gr.Blocks, host: str, port: int) -> None:
    """Serve a page until it is closed, and return when it answers."""
    page.queue(max_size=_MOST_WAITING)
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        share=False,
        quiet=True,
        max_file_size=LARGEST_FILE,
        state_session_capacity=_MOST_VISITORS,
        ssr_mode=False,
        footer_links=[],
        run_history=False,  # which offers to send them elsewhere
        css=_CSS,
        theme=_theme(),
    )


def _theme() -> gr.themes.Base:
    """A theme of the fonts that the visitor's machine has: nothing is loaded from elsewhere."""
    return gr.themes.Default(
        font=["Helvetica Neue", "Arial", "sans-serif"], font_mono=["Consolas", "monospace"]
    )


def _side(name: str) -> _Side:
    with gr.Column(min_width=300, visible=name == "first") as column:
        chosen = gr.State(None, time_to_live=_KEPT_SECONDS)
        explanation = gr.State(None, time_to_live=_KEPT_SECONDS)
        heading = gr.Markdown()
        with gr.Row():
            seen = _picture(_SEEN, f"{name}-seen")
            classes = gr.Label(
                num_top_classes=5,
                label="Most probable",
                visible=False,
                min_width=_LEAST_WIDTH,
                elem_id=f"{name}-classes",
            )
        layer = gr.Slider(1, 2, step=1, label="Layer", visible=False, elem_id=f"{name}-layer")
        with gr.Row():
            shown = [_picture(_NAMES[kind], f"{name}-{kind}") for kind in _NAMES]
        return _Side(chosen, column, explanation, heading, seen, classes, layer, *shown)


def _picture(label: str, name: str) -> gr.Image:
    return gr.Image(
        label=label,
        format="png",
        buttons=["fullscreen"],
        interactive=False,
        visible=False,
        min_width=_LEAST_WIDTH,
        elem_id=name,
        elem_classes="shown",
    )


def _shown(seen: Explanation, chosen: int | None) -> list[Any]:
    """Values of a side's outputs."""
    count = len(seen.layers)
    layer = count if chosen is None else min(chosen, count)
    heading = f"### {seen.model}\n" + " ".join(seen.notes)
    return [
        gr.Column(visible=True),
        seen,
        heading,
        gr.Image(enlarged(seen.seen), label=_SEEN, visible=True)
        if seen.drawn is None
        else gr.Image(enlarged(seen.drawn), label="Found by the model", visible=True),
        gr.Label(seen.classes, visible=seen.classes is not None),
        gr.Slider(1, max(count, 2), value=layer, label=f"Layer (of {count})", visible=count > 1),
        *_drawn(seen, layer),
    ]


def _moved(seen: Explanation | None, layer: float) -> list[Any]:
    """The layer that was chosen, and what is seen of it."""
    if seen is None:
        raise gr.Error("Choose the picture again: the page was idle for too long.")
    return [round(layer), *_drawn(seen, round(layer))]


def _drawn(seen: Explanation, layer: int) -> list[gr.Image]:
    """Gradient map, norms and losses of a layer, from 1."""
    at = seen.layers[layer - 1]
    maps = [
        None if values is None else heat_map(seen.seen, values, f"{what} of each token", at.step)
        for values, what in ((at.gradient, "‖G‖"), (at.norms, "‖x‖₂"))
    ]
    losses = None if at.losses is None else loss_curves(at.losses, at.title)
    return [
        gr.Image(
            picture,
            label=f"{name}: {at.title}",
            alt_text=f"{name} of {at.title}",
            visible=picture is not None,
        )
        for picture, name in zip([*maps, losses], _NAMES.values(), strict=True)
    ]


def _with_shown_refusals(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its refusals shown to the visitor as they are."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError as error:
            # Shown as HTML; the message may hold a checkpoint's text.
            message = html.escape(shown(str(error)), quote=False)
            raise gr.Error(message, print_exception=False) from error

    return call
