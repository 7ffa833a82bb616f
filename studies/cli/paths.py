"""`python -m studies paths MODEL… IMAGES`: gradient norms along the sequence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jsonargparse
import torch
from PIL import Image
from rich.table import Column, Table
from torch import Tensor

from studies.cli.pictures import check_picture, write_picture
from studies.scan_paths import ScanPaths, scan_path_figure, scan_paths
from vision_ttt import tasks
from vision_ttt.cli.arguments.explain import SAMPLE, WEIGHTS, name_and_arguments
from vision_ttt.cli.device import find_device
from vision_ttt.cli.plain_console import plain_console
from vision_ttt.cli.wide_table import print_whole
from vision_ttt.data import open_image
from vision_ttt.data.image_files import files_and_folders
from vision_ttt.data.sample_images import sample_images
from vision_ttt.errors import UserError
from vision_ttt.tasks.images.backbones import ImageBackbone, checkpoint_backbone, named_backbone


def run(arguments: jsonargparse.Namespace) -> int:
    """Show the norms of each model, and write their picture."""
    check_picture(arguments.figure)
    device = find_device(arguments.device)
    found = {}
    for name, model in zip(arguments.names, arguments.models, strict=True):
        backbone = _backbone(model, arguments.seed)
        images = [backbone.prepare(image) for image in _pictures(arguments.images)]
        if len({image.shape for image in images}) > 1:
            raise UserError(f"{name} would see images of several sizes; give images of one")
        options = {"draws": arguments.draws, "seed": arguments.seed}
        try:
            batch = torch.stack(images).to(device)
            found[name] = scan_paths(backbone.model.to(device), batch, **options)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: {error}") from error
    _show_blocks(found)
    _show_features(found)
    write_picture(scan_path_figure(found), Path(arguments.figure), dpi=110)
    plain_console().say(f"{arguments.figure}: the norms by distance")
    return 0


def _backbone(model: str, seed: int) -> ImageBackbone:
    if model.endswith(WEIGHTS):
        return checkpoint_backbone(*tasks.load_model(model, task=None), shorter_side=None)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        name, model_arguments = name_and_arguments(model)
        return named_backbone(name, None, model_arguments)


def _pictures(given: Sequence[str]) -> Iterator[Image.Image]:
    for word in given:
        if word.startswith(SAMPLE):
            yield from (each.open() for each in sample_images(word.removeprefix(SAMPLE)))
        else:
            yield from map(open_image, files_and_folders([word]))


def _show_blocks(found: Mapping[str, ScanPaths]) -> None:
    table = Table(*_columns(found), title="Gradient norm of one block, from token to token")
    for label, means in _ranges([paths.block for paths in found.values()], first=1):
        table.add_row(label, *means)
    print_whole(table)


def _show_features(found: Mapping[str, ScanPaths]) -> None:
    table = Table(
        *_columns(found),
        title="Gradient norm of the classification feature, from embedded image tokens",
        caption="distance: to the nearest token that the feature reads; 1 is the root mean square"
        " over the image tokens",
    )
    lengths = [paths.lengths for paths in found.values()]
    table.add_row("mean", *(f"{own.float().mean():.1f}" for own in lengths))
    table.add_row("largest", *(str(int(own.max())) for own in lengths), end_section=True)
    for label, means in _ranges([paths.feature for paths in found.values()], first=0):
        table.add_row(label, *means)
    print_whole(table)


def _columns(found: Mapping[str, ScanPaths]) -> list[Column]:
    return [Column("distance"), *(Column(name, justify="right") for name in found)]


def _ranges(norms: Sequence[Tensor], *, first: int) -> Iterator[tuple[str, list[str]]]:
    """Ranges of distances of which some model has a norm: label, and root mean squares."""
    longest = max(map(len, norms))
    starts = [0, *(2**power for power in range(longest.bit_length()))]
    starts = [start for start in starts if first <= start < longest]
    for start, stop in zip(starts, [*starts[1:], longest], strict=True):
        means = [own[start:stop].square().nanmean().sqrt().item() for own in norms]
        if not all(map(math.isnan, means)):
            label = str(start) if stop == start + 1 else f"{start} to {stop - 1}"
            yield label, ["" if math.isnan(mean) else f"{mean:.3g}" for mean in means]
