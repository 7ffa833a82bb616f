"""`vision-ttt sample --checkpoint C [--classes 0-9] [--output FILE.png]`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse
import torch
from torch import Tensor

from vision_ttt.cli.device import find_device
from vision_ttt.cli.plain_console import plain_console, progress_on
from vision_ttt.engine import ModelMetadata
from vision_ttt.engine.tensor_files import write_tensors
from vision_ttt.errors import DamagedModel, UserError, some, suggestions
from vision_ttt.files import write_bytes
from vision_ttt.tasks import load_model

if TYPE_CHECKING:  # needs diffusers
    from vision_ttt.diffusion.process import Process
    from vision_ttt.tasks.diffusion.latents import Autoencoder

_NOT_IN_NAMES = re.compile(r"^\.|[/\x00]" if os.name == "posix" else r'^\.|[\x00-\x1f/\\:*?"<>|]')
"""Characters of a class name that could leave or hide its folder, or that the system refuses."""

_DECODED_AT_ONCE = 8  # latents


def run(arguments: jsonargparse.Namespace) -> int:
    """Generate, write, and say what was written."""
    # Needs diffusers, which the other commands and --help do without.
    from vision_ttt.diffusion import make_process
    from vision_ttt.diffusion.sampling import default_steps
    from vision_ttt.tasks.diffusion.pictures import CENTRED, grid, to_pixels, to_png

    output, device = Path(arguments.output), find_device(arguments.device)
    suffix = output.suffix.lower()
    model, metadata = load_model(arguments.checkpoint, task="diffusion")
    pixels_wanted = suffix == ".png" or arguments.images is not None
    name, autoencoder = _autoencoder(metadata, arguments), None
    if pixels_wanted and name is not None:
        from vision_ttt.tasks.diffusion.latents import Autoencoder

        autoencoder = Autoencoder(name).to(device)
        if autoencoder.channels != model.in_channels:
            raise UserError(
                f"the autoencoder's latents have {autoencoder.channels} channels, those of"
                f" {arguments.checkpoint} {model.in_channels}"
            )
    elif pixels_wanted and model.in_channels != 3:
        raise UserError(
            f"{arguments.checkpoint} makes latents of {model.in_channels} channels, which are no"
            " pictures; name their --autoencoder, or write them with --output FILE.safetensors"
        )
    classes = _chosen(arguments.classes, metadata.carried["classes"])
    folders = {} if arguments.images is None else _folders(classes, metadata.carried["classes"])
    labels = torch.tensor(classes, device="cpu").repeat_interleave(arguments.per_class)
    process = make_process(**metadata.carried["process"])
    if arguments.steps is None:
        arguments.steps = default_steps(process)
    samples = _generate(model.to(device), metadata, process, labels, arguments)
    if not torch.isfinite(samples).all():
        raise DamagedModel(f"{arguments.checkpoint} makes NaN: its weights are damaged")
    console = plain_console()
    if suffix == ".safetensors":
        write_tensors(
            output, {"samples": samples, "labels": labels}, json.dumps(_metadata(arguments))
        )
    if pixels_wanted:
        statistics = metadata.carried["input"] if autoencoder is None else CENTRED
        pictures = []
        for number, sample in enumerate(_decoded(samples, autoencoder)):
            picture = to_pixels(sample, statistics)
            if suffix == ".png":
                pictures.append(picture)
            if arguments.images is not None:
                folder = folders[int(labels[number])]
                path = Path(arguments.images) / folder / f"{number:05d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, to_png(picture))
        if suffix == ".png":
            shown = [metadata.carried["classes"][index] for index in classes]
            write_bytes(output, to_png(grid(torch.stack(pictures), arguments.per_class, shown)))
        if arguments.images is not None:
            console.say(f"{arguments.images}: {len(labels)} images")
            for index, folder in folders.items():
                label = metadata.carried["classes"][index]
                if folder != label:
                    console.say(f"{label!r} cannot name a folder; its images are in {folder}")
    names = ", ".join(metadata.carried["classes"][index] for index in classes[:12])
    console.say(
        f"{output}: {len(labels)} samples of {metadata.model}, {arguments.per_class} of each class:"
        f" {names}{', …' if len(classes) > 12 else ''}"
    )
    return 0


def _decoded(samples: Tensor, autoencoder: Autoencoder | None) -> Iterator[Tensor]:
    """Samples [C, H, W], latents decoded a few at a time: there may be no memory for all images."""
    if autoencoder is None:
        yield from samples
        return
    for latents in samples.split(_DECODED_AT_ONCE):
        yield from autoencoder.decode(latents)


def _autoencoder(metadata: ModelMetadata, arguments: jsonargparse.Namespace) -> str | None:
    """Name of the autoencoder of the latents, None for pixels and where it is not known."""
    return arguments.autoencoder or metadata.task.get("autoencoder")


def _metadata(arguments: jsonargparse.Namespace) -> dict[str, object]:
    """What repeats the samples."""
    names = ("checkpoint", "classes", "per_class", "guidance", "steps", "sampler", "seed")
    return {name: getattr(arguments, name) for name in names}


def _chosen(given: str | None, names: Sequence[str]) -> list[int]:
    """Class numbers of names, numbers and ranges with commas between; names come first."""
    if given is None:
        return list(range(min(10, len(names))))
    chosen: list[int] = []
    for word in (part.strip() for part in given.split(",")):
        numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", word)
        if word in names:
            chosen.append(names.index(word))
        elif numbers is not None:
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last < len(names):
                raise UserError(f"classes {word}: numbers go from 0 to {len(names) - 1}, upwards")
            chosen.extend(range(first, last + 1))
        else:
            raise UserError(f"there is no class {word!r}; {suggestions(word, names)}")
    return chosen


def _folders(classes: Sequence[int], names: Sequence[str]) -> dict[int, str]:
    """Class number → name of the folder of its images."""
    folders = {index: _NOT_IN_NAMES.sub("_", names[index]) for index in classes}
    for folder in folders.values():
        alike = [names[other] for other, same in folders.items() if same == folder]
        if len(alike) > 1:
            raise UserError(
                f"--images has one folder {folder!r} for {some(alike)}; choose one of them by"
                " --classes"
            )
    return folders


def _generate(
    model: torch.nn.Module,
    metadata: ModelMetadata,
    process: Process,
    labels: Tensor,
    arguments: jsonargparse.Namespace,
) -> Tensor:
    from vision_ttt.diffusion import sample

    channels, *size = metadata.carried["input"]["input_size"]
    with progress_on(plain_console(stderr=True)) as progress:
        bar = progress.add_task(
            f"steps of {len(labels)} images", total=len(labels) * arguments.steps
        )
        try:
            return sample(
                model,
                process,
                labels,
                size=tuple(size),
                sampler=arguments.sampler,
                steps=arguments.steps,
                guidance=arguments.guidance,
                seed=arguments.seed,
                # Latents have no bounds.
                clip=channels == 3 and _autoencoder(metadata, arguments) is None,
                batch_size=arguments.batch_size,
                advance=lambda images: progress.advance(bar, images),
            )
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
