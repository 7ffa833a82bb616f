"""transformers' Trainer."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from language_models import MAMBA, small_config
from vision_ttt.language import TTTForCausalLM


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
def test_twenty_steps_lower_the_loss(tmp_path):
    torch.manual_seed(0)
    model = TTTForCausalLM(small_config(**MAMBA))
    ids = torch.arange(64) % 7  # a sequence that can be learned
    rows = [{"input_ids": ids[i : i + 16], "labels": ids[i : i + 16]} for i in range(40)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=20,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert abs(losses[0] - torch.tensor(31).log()) < 0.3  # per token, not per batch
    assert sum(losses[-3:]) / 3 < 0.8 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]
