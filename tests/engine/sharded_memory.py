"""Measure what saving and loading 100 million sharded weights needs; for torchrun.

    torchrun --nproc_per_node=2 sharded_memory.py FOLDER

Each process prints a line of JSON: the bytes of its shard (weights, average, AdamW's moments) and,
for each operation, by how much the resident memory rose above that before it, and the seconds.
The rise is VmHWM, the kernel's high-water mark, reset before the operation, less VmRSS before it.
Loading allocates the moments anew, and the mapped pages of the files that are read count, too.
"""

import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vision_ttt.engine.parallel import make_accelerator, share_model
from vision_ttt.engine.run_directory import save_checkpoint
from vision_ttt.engine.sharded_tensors import is_sharded
from vision_ttt.engine.state import SavedRun, TrainState, open_state, optimizer_moments, restore
from vision_ttt.engine.tensor_files import write_tensors


class Large(nn.Module):
    """Twelve blocks of 8.4 million weights."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(1024, 4096), (4096, 1024)]
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(*shape) for shape in shapes)) for _ in range(12)
        )


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(operation: Callable[[], object]) -> dict[str, float]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    before, started = resident("VmRSS"), time.perf_counter()
    operation()
    return {"bytes": resident("VmHWM") - before, "seconds": time.perf_counter() - started}


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = make_accelerator()
    model = Large()
    average = copy.deepcopy(model)
    for each in (model, average):
        share_model(each, accelerator, "sharded")
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    parts = (model.state_dict(), average.state_dict(), optimizer_moments(model, optimizer))
    saved = SavedRun(TrainState(update=1), *parts)
    own = [t.to_local() if is_sharded(t) else t for t in saved.tensors.values()]
    shard = sum(tensor.nbytes for tensor in own)
    file, path = (
        folder / "last.safetensors",
        folder / "checkpoints" / "update-000000001.safetensors",
    )
    is_main = accelerator.is_main_process
    weights = measure(lambda: write_tensors(file, average.state_dict(), "null", writes=is_main))
    checkpoint = measure(lambda: save_checkpoint(folder, saved, 1, accelerator))
    checking = measure(lambda: open_state(path, hashing=is_main))
    run = open_state(path, hashing=is_main)
    loading = measure(lambda: restore(run, model, average, optimizer))
    told = {"shard": shard, "weights": weights, "checkpoint": checkpoint}
    sys.stdout.write(json.dumps({**told, "checking": checking, "loading": loading}) + "\n")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main()
