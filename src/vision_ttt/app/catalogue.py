"""The models that visitors choose among: named at start, loaded when chosen, some of them kept."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
from torch import nn

from vision_ttt import tasks
from vision_ttt.data.loading import isolated_generators, seed_generators
from vision_ttt.engine.checkpoint import read_metadata
from vision_ttt.errors import UserError, suggestions
from vision_ttt.models import list_models
from vision_ttt.tasks.images.backbones import ImageBackbone, checkpoint_backbone, named_backbone
from vision_ttt.tasks.images.predicting import ImagePredictor

TASKS = ("classification", "detection", "segmentation")
"""Tasks whose models look at images."""
KEPT_BYTES = 2 << 30
"""Largest size of the parameters and buffers that are kept for later visits."""


class CatalogueError(UserError, ValueError):
    """A model cannot be offered, or is not offered."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with what it needs to look at pictures."""

    name: str
    """As the catalogue lists it."""
    model: nn.Module
    """The whole model."""
    backbone: ImageBackbone
    """What is looked into: the model itself, or what a dense one has for a backbone."""
    predictor: ImagePredictor | None
    """Predicts with the whole model; None for the random weights of a bare name."""
    device: torch.device
    """Where the model is."""
    running: threading.Lock
    """Lock to hold while the model runs. Only one visitor may look inside a model at a time, and
    only one thread may use the process's random generators. All models share the lock, because one
    run uses all cores."""

    @property
    def bytes(self) -> int:
        """The size of its parameters and buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum(x.numel() * x.element_size() for x in tensors)


@dataclass
class _Entry:
    """A place for a model, which one thread at a time fills."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    loaded: LoadedModel | None = None


class Catalogue:
    """The offered models by name. Any number of threads may use it.

    Args:
        given: paths of checkpoints, and names of models, which get random weights. The models of
            this package follow them.
        device: where the models run.

    Raises:
        FileNotFoundError, CheckpointError: a checkpoint is missing, or is not a checkpoint.
        CatalogueError: a checkpoint belongs to another task, or there is no model of a given name.
    """

    def __init__(self, given: Sequence[str] = (), *, device: torch.device | None = None) -> None:
        self.device = torch.device("cpu") if device is None else device
        self.kept_bytes = KEPT_BYTES
        paths = list(dict.fromkeys(Path(each) for each in given if is_checkpoint(each)))
        models = [each for each in given if not is_checkpoint(each)]
        for path in paths:
            _check_trained_for_images(path)
        for name in models:
            _check_name(name)
        self._paths = dict(zip(_short_names(paths), paths, strict=True))
        self.names = tuple(dict.fromkeys([*self._paths, *models, *_zoo()]))
        """All that is offered, in the order of the page."""
        self._running = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the longest unused one first
        self._lock = threading.Lock()

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the models in memory, the longest unused one first."""
        with self._lock:
            return tuple(name for name, entry in self._entries.items() if entry.loaded is not None)

    def load(self, name: str) -> LoadedModel:
        """Return an offered model, from memory where it is there.

        Raises:
            CatalogueError: it is not offered, its checkpoint is damaged or gone, or needs a package
                that is not installed. Visitors read the message: it names no folder.
        """
        if name not in self.names:
            raise CatalogueError(f"{name!r} is not offered; {suggestions(name, self.names)}")
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            self._entries.move_to_end(name)
        with entry.lock:  # who comes second waits, and finds it loaded
            if entry.loaded is None:
                try:
                    entry.loaded = self._read(name)
                except (UserError, OSError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    path = self._paths.get(name)
                    message = reason if path is None else reason.replace(str(path), "the file")
                    raise CatalogueError(f"{name} cannot be loaded: {message}") from error
            loaded = entry.loaded
        self._drop_unused()
        return loaded

    def _read(self, name: str) -> LoadedModel:
        if name not in self._paths:
            with self._running, isolated_generators():
                seed_generators(0)  # the same weights for every visitor
                backbone = named_backbone(name, None)
            model = backbone.model.to(self.device)
            return LoadedModel(name, model, backbone, None, self.device, self._running)
        model, metadata = tasks.load_model(self._paths[name], task=None)
        section = tasks.find(metadata.task["name"])
        predictor = section.predictor(
            model.to(self.device),
            metadata,
            device=self.device,
            precision="float32",
            topk=None,
            batch_size=1,
            num_workers=0,
        )
        backbone = checkpoint_backbone(model, metadata, shorter_side=None)
        return LoadedModel(name, model, backbone, predictor, self.device, self._running)

    def _drop_unused(self) -> None:
        with self._lock:
            sizes = {
                name: entry.loaded.bytes
                for name, entry in self._entries.items()
                if entry.loaded is not None
            }
            total = sum(sizes.values())
            for name in list(sizes)[:-1]:
                if total <= self.kept_bytes:
                    break
                total -= sizes[name]
                del self._entries[name]


def is_checkpoint(given: str) -> bool:
    """Whether what is given at start is a file, there or not, and not the name of a model."""
    return given.endswith(".safetensors") or "/" in given or Path(given).exists()


def _zoo() -> list[str]:
    """The models of this package that look at images; the others of its registry denoise."""
    return [name for name in list_models() if timm.is_model(name)]


def _check_name(name: str) -> None:
    if not timm.is_model(name):
        raise CatalogueError(
            f"{name!r} is neither a checkpoint (.safetensors) nor a model;"
            f" {suggestions(name, _zoo())}"
        )


def _check_trained_for_images(path: Path) -> None:
    name = read_metadata(path).task.get("name")
    if name not in TASKS:
        raise CatalogueError(
            f"{path} holds {tasks.find(name).HOLDS}; the page shows models for {', '.join(TASKS)}"
        )


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The ends of paths, as long as it takes to tell them apart, and without `.safetensors`.

    Visitors need not know the folders of the machine.
    """
    parts = [Path(str(path.absolute()).removesuffix(".safetensors")).parts for path in paths]
    count = 2
    while len({own[-count:] for own in parts}) < len({*parts}):
        count += 1
    return ["/".join(own[-count:]) for own in parts]
