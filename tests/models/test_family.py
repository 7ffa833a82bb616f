"""Families: each model of a table is registered, by an entrypoint of its own."""

from pathlib import Path

import pytest
import timm
import torch

from vision_ttt import models
from vision_ttt.models.family import Family

FAMILIES = {
    name: module.FAMILY
    for name, module in vars(models).items()
    if isinstance(getattr(module, "FAMILY", None), Family)
}
"""Those of the modules that the package imports, by these modules' names."""


def test_importing_the_package_registers_the_families() -> None:
    every = [name for family in FAMILIES.values() for name in family.models]
    assert len(every) == len(set(every)) > 30
    assert set(every) <= set(models.list_models())
    files = Path(models.__file__).parent.glob("*.py")
    declaring = {file.stem for file in files if "\nFAMILY = Family(" in file.read_text("utf-8")}
    assert set(FAMILIES) == declaring


@pytest.mark.parametrize("module", FAMILIES)
def test_an_entrypoint_builds_the_model_of_its_name(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[module]
    built: list[tuple] = []
    monkeypatch.setattr(family, "create", lambda *given, **others: built.append((given, others)))
    for name in family.models:
        entrypoint = timm.model_entrypoint(name)
        assert entrypoint.__module__ == f"{models.__name__}.{module}"
        assert entrypoint.__doc__
        entrypoint(True, depth=1)
    assert built == [((name, True), {"depth": 1}) for name in family.models]


@pytest.mark.parametrize("module", FAMILIES)
def test_arguments_replace_those_of_the_table(module: str) -> None:
    family = FAMILIES[module]
    name, own = next(iter(family.models.items()))
    side = own.get("img_size", 224 if "224" in name else 32)
    assert timm.get_pretrained_cfg(name).input_size == (3, side, side)
    assert family.create(name, depth=1, num_classes=2).num_classes == 2
    features = family.create(name, depth=2, features_only=True)
    assert len(features.feature_info.channels()) == 2
    with pytest.raises(TypeError, match="nonsense"):
        family.create(name, nonsense=1)


@pytest.mark.parametrize("module", FAMILIES)
def test_weights_of_another_image_size_fit_every_family(module: str) -> None:
    """Positions, of families that have some, are interpolated when weights are loaded."""
    name = next(iter(FAMILIES[module].models))
    small = {"depth": 1, "num_classes": 3, "img_size": 32, "patch_size": 8}
    weights = FAMILIES[module].create(name, **small).state_dict()
    overlay = {"state_dict": weights, "num_classes": 3}
    larger = {**small, "img_size": 64, "pretrained_cfg_overlay": overlay}
    model = timm.create_model(name, pretrained=True, **larger)
    assert torch.equal(model.head.weight, weights["head.weight"])
    if "pos_embed" in weights:
        assert (weights["pos_embed"].shape[1], model.pos_embed.shape[1]) == (16, 64)
