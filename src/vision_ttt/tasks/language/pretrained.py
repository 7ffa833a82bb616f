"""Language models from folders that transformers wrote."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from vision_ttt.engine.tensor_files import CheckpointError, inspect_tensors
from vision_ttt.errors import some
from vision_ttt.file_kinds import check_files_in
from vision_ttt.models.number_kinds import kind_of_number
from vision_ttt.tasks.language.code_refusal import code_refused
from vision_ttt.tasks.language.models import OWN


def load_pretrained(folder: Path) -> PreTrainedModel:
    """Return the causal language model of a folder, in evaluation mode.

    Only safetensors are read, no pickle, and no code of the folder is run.

    Raises:
        CheckpointError: the folder is damaged, its model is not a causal one, or weights are
            missing, left over or of another kind of numbers.
    """
    try:
        check_files_in(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["model_type"] == OWN:
            import vision_ttt.language  # noqa: F401  registers it with transformers
        logging.disable_progress_bar()
        with code_refused():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    # Configs and constructors of transformers' many models raise anything.
    except Exception as error:
        raise CheckpointError(
            f"{folder} is no causal language model that transformers can read: {error}"
        ) from error
    wrong = {name: sorted(map(str, found[name])) for name in ("missing_keys", "unexpected_keys")}
    for name, keys in wrong.items():
        if keys:
            raise CheckpointError(
                f"the weights in {folder} do not fit its model: {name.replace('_', ' ')}"
                f" {some(keys)}"
            )
    _check_kinds(folder, model)
    return model.eval()


def _check_kinds(folder: Path, model: PreTrainedModel) -> None:
    """Raise CheckpointError if a folder's weights are of another kind; transformers casts them."""
    own = {name: weight.dtype for name, weight in model.state_dict().items()}
    for file in sorted(folder.glob("*.safetensors")):
        for name, (dtype, _) in inspect_tensors(file, hashing=False).shapes.items():
            if name in own and kind_of_number(dtype) != kind_of_number(own[name]):
                raise CheckpointError(
                    f"{file} has a tensor whose kind of numbers differs from the model's: {name}"
                    f" {dtype} for {own[name]}"
                )
