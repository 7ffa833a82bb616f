"""Families of plain backbones as timm's registry has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from timm.models import DefaultCfg, register_model

from vision_ttt.models.building import build_model, feature_cfg, pretrained_cfg
from vision_ttt.models.fitted_weights import pretrained_filter_fn
from vision_ttt.models.packaged_weights import family_cfgs
from vision_ttt.models.plain_backbone import PlainBackbone

Model = TypeVar("Model", bound=PlainBackbone)


class Family(Generic[Model]):
    """The registered models of one class.

    A family is a file: a subclass of :class:`PlainBackbone`, a table of its models, and for each of
    them an entrypoint, which timm's registry looks up by its name in that module, and
    ``default_cfgs`` beside it::

        FAMILY = Family(Vim, {"vim_tiny_patch16_224": {"embed_dim": 192}}, __name__, fixed=True)
        default_cfgs = FAMILY.default_cfgs

        vim_tiny_patch16_224 = FAMILY.entrypoint("vim_tiny_patch16_224", "Vim-T: 7M parameters.")

    Args:
        model_class: a subclass of :class:`PlainBackbone`, whose arguments all have defaults.
        models: name of each model → its arguments, as far as they are not the defaults.
        module: of the entrypoints.
        fixed: whether the weights depend on the image size.

    Attributes:
        models: as given.
        default_cfgs: timm's descriptions of the models, and of their packaged weights.
    """

    def __init__(
        self,
        model_class: type[Model],
        models: Mapping[str, Mapping[str, Any]],
        module: str,
        *,
        fixed: bool,
    ) -> None:
        self.model_class = model_class
        self.models = models
        self.module = module
        self._defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(model_class).parameters.items()
        }
        self.default_cfgs: dict[str, DefaultCfg] = family_cfgs(
            {
                name: pretrained_cfg({**self._defaults, **own}["img_size"], fixed=fixed)
                for name, own in models.items()
            }
        )

    def entrypoint(self, name: str, description: str) -> Callable[..., Model]:
        """Register a model of the table with timm; returns the function that builds it."""

        def create(pretrained: bool = False, **kwargs: Any) -> Model:
            return self.create(name, pretrained, **kwargs)

        create.__name__ = create.__qualname__ = name
        create.__module__, create.__doc__ = self.module, description
        return register_model(create)

    def create(self, name: str, pretrained: bool = False, **kwargs: Any) -> Model:
        """Build a model of the table through timm.

        Args:
            name: of the model.
            pretrained: load weights.
            kwargs: arguments of the model or of timm, which replace those of the table.

        Raises:
            TypeError, ValueError: an argument is unknown or out of its range.
        """
        arguments = {**self.models[name], **kwargs}
        return build_model(
            self.model_class,
            name,
            pretrained,
            pretrained_filter_fn=pretrained_filter_fn,
            feature_cfg=feature_cfg({**self._defaults, **arguments}["depth"]),
            **arguments,
        )
