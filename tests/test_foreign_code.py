"""Every call that loads others' files refuses to run their code, and says so where it is made."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REFUSALS = {
    "from_pretrained": {"trust_remote_code": False, "local_files_only": True},
    "from_config": {"trust_remote_code": False},
    "create_dataset": {"trust_remote_code": False},
    "load_dataset": {"trust_remote_code": False},
    "torch.load": {"weights_only": True},
    "np.load": {"allow_pickle": False},
    "hf_hub_download": {"filename": "model.safetensors"},
}
"""What a call of that name must be given; a name without a dot is that of any owner's function."""
NEVER = {
    *("pickle.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "joblib.load"),
    *("snapshot_download", "get_class_from_dynamic_module"),
}
"""Calls that are not made at all."""
OWN_BYTES = {"pickle.loads": {"src/vision_ttt/data/coco.py"}}
"""Calls that are made on what the same process wrote, and the files that may make them."""


def _calls(source: str) -> Iterator[tuple[str, dict[str, object], int]]:
    """Names of called functions, with their owners', and the constants among their keywords."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            given = {
                each.arg: each.value.value
                for each in node.keywords
                if isinstance(each.value, ast.Constant)
            }
            yield ast.unparse(node.func), given, node.lineno


def _faults(source: str, file: str) -> list[str]:
    def is_called(name: str, called: str) -> bool:
        return called == name or ("." not in name and called.rpartition(".")[2] == name)

    faults = []
    for called, given, line in _calls(source):
        for name, needed in REFUSALS.items():
            if is_called(name, called) and not needed.items() <= given.items():
                faults.append(f"{file}:{line}: {called} without {needed}")
        if any(is_called(name, called) for name in NEVER):
            faults.append(f"{file}:{line}: {called}")
        if any(is_called(n, called) and file not in files for n, files in OWN_BYTES.items()):
            faults.append(f"{file}:{line}: {called}")
    return faults


def test_every_loader_that_is_called_refuses() -> None:
    files = [
        file for folder in ("src", "packaging", "studies") for file in (ROOT / folder).rglob("*.py")
    ]
    found = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert not [fault for file, source in found.items() for fault in _faults(source, file)]
    called = {name for source in found.values() for name, _, _ in _calls(source)}
    # The test would not see them any more if they were called otherwise.
    assert {"AutoTokenizer.from_pretrained", "timm.data.create_dataset", "torch.load"} <= called


@pytest.mark.parametrize(
    "source",
    [
        "AutoTokenizer.from_pretrained(folder, local_files_only=True)",
        "AutoModel.from_pretrained(x, local_files_only=True, trust_remote_code=given)",
        "AutoModel.from_pretrained(x, trust_remote_code=False)",
        "x.from_config(config)",
        "create_dataset(name, trust_remote_code=True)",
        "torch.load(path)",
        "pickle.loads(content)",
        "huggingface_hub.snapshot_download(name)",
        "hf_hub_download(name, filename=given)",
    ],
)
def test_a_loader_without_its_refusal_is_found(source: str) -> None:
    assert len(_faults(source, "x.py")) == 1
