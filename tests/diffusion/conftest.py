"""A small diffusion model; and all of these tests need the package of the extra [diffusion]."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from vision_ttt.models import DiT3

collect_ignore_glob = ["test_*.py"] if find_spec("diffusers") is None else []


@pytest.fixture
def make_model() -> Callable[..., DiT3]:
    """Build a DiT³ in evaluation mode whose every parameter matters, with three classes."""

    def make(**options: object) -> DiT3:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
        model = DiT3(**{"input_size": 8, "in_channels": 3, **sizes, **options}).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return make
