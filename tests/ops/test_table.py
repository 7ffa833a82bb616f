"""The table of ops: that it is whole, and that what stands twice is the same."""

import ctypes
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hostile_calls import ARGUMENTS, PUBLIC
from vision_ttt import ops
from vision_ttt.ops import _native
from vision_ttt.ops._table import TABLE

every_op = pytest.mark.parametrize("op", TABLE.values(), ids=TABLE)
FOLDER = Path(ops.__file__).parent
NOT_IN_IT = {"packed"}
"""The folder of ops for inference on packed weights."""

FOLDER_OF = {"depthwise_correlation": "vit3_ttt"}
"""Folders that are not named like their op, because they hold more of the same computation."""


ALIKE = {
    "swiglu_mlp": {"cpu.py", "matrix_products.py"},
    "swiglu_ttt": {"matrix_products.py"},
    "ttt_linear": {"triton_backend.py"},
    "ttt_mlp": {"triton_backend.py"},
}
"""Files of backends where some are alike: matrix products around another op, or the learners'."""


def names_in(schema) -> list[str]:
    return [argument.name for argument in schema.arguments]


def test_every_folder_is_an_op_of_the_same_files():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders - NOT_IN_IT == {FOLDER_OF.get(name, name) for name in TABLE}
    assert set(TABLE) == set(ARGUMENTS) == set(PUBLIC)
    for op in TABLE.values():
        files = {path.name for path in (FOLDER / FOLDER_OF.get(op.name, op.name)).glob("*.py")}
        backends = {"triton": "triton_backend.py"}
        wanted = {"contract.py", "definition.py", "op.py"}
        if op.name in ALIKE:
            wanted |= ALIKE[op.name]
        else:
            wanted |= {backends.get(name, f"{name}.py") for name in op.backends}
        assert wanted <= files, op.name
        assert not files & {"api.py", "reference.py", "autograd.py"}


def test_every_custom_op_belongs_to_the_table():
    known = set()
    for op in TABLE.values():
        known |= {op.name} | ({f"{op.name}_backward"} if op.backward_op else set())
    known |= {"ttt_linear_part", "ttt_mlp_part"}
    registered = torch._C._dispatch_get_all_op_names()
    found = {n.split("::")[1].split(".")[0] for n in registered if "vision_ttt::" in n}
    assert {name for name in found if not name.startswith("packed_")} == known


@every_op
def test_inputs_contract_and_schema_name_the_same_arguments(op):
    assert op.contract.names == op.bare_contract.names == op.inputs._fields
    names = names_in(op.forward_op._schema)
    assert tuple(names[: op.width]) == op.inputs._fields
    assert ("backend" in names) == op.backend_at_runtime
    assert len(names) == op.width + (op.kept is not None) + op.backend_at_runtime
    if op.backward_op is not None:
        names = names_in(op.backward_op._schema)
        assert tuple(names[: len(names) - op.backend_at_runtime]) == op.backward_contract.names


@every_op
def test_a_backward_op_s_arguments_are_told_apart(op):
    if op.backward_op is None:
        pytest.skip("its derivative is made up of other ops")
    names = names_in(op.backward_op._schema)
    grads, inputs, kept = op.split(names)
    assert all(name.startswith("grad") for name in grads)
    assert tuple(inputs) == op.inputs._fields
    assert [*grads, *inputs[: op.tensors], *kept, *inputs[op.tensors :]] == names[
        : len(names) - op.backend_at_runtime
    ]


def structures() -> list[type[ctypes.Structure]]:
    importlib.import_module("vision_ttt.ops.packed")
    for op in TABLE:
        if (FOLDER / op / "cpu.py").exists():
            importlib.import_module(f"vision_ttt.ops.{op}.cpu")
    ours = ctypes.Structure.__subclasses__()
    return [s for s in ours if s.__module__.startswith("vision_ttt.ops.")]


@pytest.mark.parametrize("structure", structures(), ids=lambda s: s.__name__)
def test_structures_are_as_large_as_the_kernels_have_them(structure):
    assert _native.LIBRARY.vision_ttt_sizeof(structure.mirrored.encode()) == ctypes.sizeof(
        structure
    )


def numbers(kind: type, count: Iterator[int]) -> list[int]:
    """A number of its own for every field of a structure or of those in it."""
    if issubclass(kind, ctypes.Structure):
        return [number for _, field in kind._fields_ for number in numbers(field, count)]
    if issubclass(kind, ctypes.Array):
        return [number for _ in range(kind._length_) for number in numbers(kind._type_, count)]
    return [next(count)]


def fields_of(x: object) -> list:
    """The values of a structure's fields and of those in it."""
    if isinstance(x, ctypes.Structure):
        return [value for name, _ in x._fields_ for value in fields_of(getattr(x, name))]
    if isinstance(x, ctypes.Array):
        return [value for item in x for value in fields_of(item)]
    return [x]


@pytest.mark.parametrize("structure", structures(), ids=lambda s: s.__name__)
def test_a_packed_structure_has_its_numbers_where_the_kernels_read_them(structure):
    values = numbers(structure, itertools.count(1))
    packed = structure.pack(*values)
    assert len(packed) == ctypes.sizeof(structure)
    assert fields_of(structure.from_buffer_copy(packed)) == values


def test_every_structure_that_a_header_defines_has_a_size():
    sources = FOLDER.parents[2] / "csrc"
    if not sources.exists():
        pytest.skip("an installed package has no sources")
    headers = (path.read_text() for path in sources.rglob("*.h"))
    defined = {
        name
        for header in headers
        if 'extern "C" {' in header
        for name in re.findall(r"^struct (\w+) {", header, re.MULTILINE)
    }
    assert len(defined) > 10
    assert all(_native.LIBRARY.vision_ttt_sizeof(name.encode()) > 0 for name in defined)
    assert {s.mirrored for s in structures()} <= defined


def test_a_structure_of_another_size_is_an_error():
    class Other(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int64),)

    for name, size in (("Conv1d", r"\d\d+"), ("Nothing", "-1")):
        message = f"{name} has 8 bytes here and {size} in the compiled CPU kernels"
        with pytest.raises(ImportError, match=message):
            _native.mirrors(name)(Other)
