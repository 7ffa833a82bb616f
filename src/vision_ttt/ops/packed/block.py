"""Whole blocks as ops. A table of parameters defines a block's vector, contract and call."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_ttt.ops import _native
from vision_ttt.ops._contract import Contract, Real, Whole, check_number
from vision_ttt.ops._native import call_kernel
from vision_ttt.ops._shapes import Shape, parse_axis
from vision_ttt.ops._table import TABLE
from vision_ttt.ops.packed.weights import DTYPES, pack, packed_shape

WORD = torch.int32
"""The vector's dtype: four bytes hold one float32 or two bfloat16 numbers. As an integer dtype it
is unaffected by ``model.to(dtype)``."""

LINE = 16
"""Words of a cache line. Every tensor begins at the start of a line."""

FLAG = Whole(0, 1)
GRID = ("height", "width")
_LARGEST = 2**63 - 1
"""The largest int of the kernels' structures."""


Run = Callable[..., Any]
"""Runs an op of the table by its name on arguments: :func:`define` or :func:`run_op`."""


class _Part(NamedTuple):
    shape: Shape
    is_packed: bool
    condition: str | None


def _parse(text: str) -> _Part:
    shape, _, condition = text.partition(" if ")
    kind, _, rest = shape.partition(" ")
    axes = (rest if kind == "packed" else shape).split()
    return _Part(tuple(map(parse_axis, axes)), kind == "packed", condition or None)


class Place(NamedTuple):
    """The place of a tensor in the vector; ``size`` is its shape before it was packed."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    is_packed: bool

    @property
    def words(self) -> int:
        """The number of words of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize // 4

    @property
    def end(self) -> int:
        """The start of the next tensor."""
        return self.start + -(-self.words // LINE) * LINE


class Block:
    """The parameters and numbers of one kind of block, and the op that runs it.

    All parameters lie in one vector, so that a call has a single tensor to check. Names of
    parameters and numbers are those of the fields that the kernel reads them from.

    Args:
        name: the op's.
        structure: the kernel's description of a block.
        parameters: field → shape, in the vector's order. ``"packed C I"`` is the weight [C, I] of
            a linear layer for :func:`pack`, ``"C if S"`` a tensor that the block lacks where the
            size S is 0. A symbol is ``dim``, a field of ``sizes`` or what ``derive`` returns.
        sizes: a named tuple of the whole numbers that, with ``dim``, determine all shapes. One
            of them is ``is_bfloat16``, the dtype of the packed weights.
        ranges: the ranges of the whole numbers whose range is not ``Whole(1)``.
        floats: name → range of the call's floating-point numbers, in their order.
        derive: (op, sizes) → further numbers. It raises a ValueError for sizes that contradict
            each other.
        refusal: sizes → the reason why the kernels do not support them, or None if they do.
        leading: the whole numbers of a call before the sizes, such as the grid's.
        further: (arguments, sizes): raises an error for other arguments of a call that do not fit.
        kernel: the kernel's name if it is not the op's. The C function ``vision_ttt_KERNEL`` runs
            it, and ``vision_ttt_KERNEL_scratch`` returns the size of its scratch memory in bytes.
    """

    def __init__(
        self,
        name: str,
        structure: type[ctypes.Structure],
        parameters: Mapping[str, str],
        sizes: type[Any],
        *,
        ranges: Mapping[str, Whole],
        floats: Mapping[str, Real],
        derive: Callable[[str, Mapping[str, int]], Mapping[str, int]],
        refusal: Callable[[Mapping[str, int]], str | None],
        leading: Sequence[str],
        further: Callable[[Mapping[str, Any], Mapping[str, int]], None] | None = None,
        kernel: str | None = None,
    ) -> None:
        self.name, self.structure, self.sizes = name, structure, sizes
        self.parameters = {field: _parse(text) for field, text in parameters.items()}
        self.ints = {field: Whole(1) for field in (*leading, *sizes._fields)}
        self.ints |= ranges
        self.floats = dict(floats)
        self.fields = tuple(_fields_of(structure))
        self.first_size = len(leading)
        self._derive, self._refusal, self._further = derive, refusal, further
        # Without a cache, describing a block would take longer than many of its kernels at 32².
        self._describe = functools.lru_cache(maxsize=256)(self.describe)
        self._kernel = f"vision_ttt_{kernel or name}"
        self._scratch = f"{self._kernel}_scratch"
        if _native.LIBRARY is not None:
            getattr(_native.LIBRARY, self._scratch).restype = ctypes.c_int64

    def contract(
        self, weights: str, numbers: Sequence[str], halves: Sequence[str] = (), **tensors: str
    ) -> Contract:
        """The op's contract.

        Args:
            weights: the shape of the op's ``weights``.
            numbers: the names of the arguments that hold its whole and its other numbers.
            halves: the further tensors that may also be bfloat16.
            tensors: further tensors in float32.
        """
        floats = dict.fromkeys(("y", *tensors), (torch.float32,))
        return Contract(
            self.name,
            {"y": "B T dim", "weights": weights, **tensors},
            dtypes={**floats, **dict.fromkeys(halves, DTYPES), "weights": (WORD,)},
            may_be_0=("B", "T"),
            others=numbers,
            further=self._check,
        )

    def places(self, dim: int, sizes: Sequence[int], *, portable: bool = False) -> dict[str, Place]:
        """The place of each parameter that a block of these sizes has.

        Raises:
            ValueError: the sizes contradict each other.
        """
        return self._places(self.symbols(dim, sizes), portable)

    def join(
        self,
        parameters: Mapping[str, Tensor | None],
        dim: int,
        sizes: Sequence[int],
        *,
        portable: bool = False,
    ) -> Tensor:
        """Pack a block's parameters into one vector, the form that the op expects.

        The layout of a ``portable`` vector does not depend on the processor.

        Raises:
            ValueError: the parameters do not fit a block of these sizes.
        """
        lines = []
        for field, place in self.places(dim, sizes, portable=portable).items():
            x = parameters[field]
            if x is None or x.shape != place.size:
                got = None if x is None else list(x.shape)
                raise ValueError(f"{self.name}: {field} must be {list(place.size)}, got {got}")
            x = pack(x, place.dtype, not portable) if place.is_packed else x.detach().float()
            words = x.contiguous().reshape(-1).view(WORD)
            lines.append(F.pad(words, (0, -len(words) % LINE)))
        return torch.cat(lines)

    def split(
        self,
        words: Tensor,
        dim: int,
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        portable: bool = False,
        view: Callable[[Tensor, torch.dtype], Tensor] = Tensor.view,
    ) -> dict[str, Tensor]:
        """The parameters in vectors [..., words] of :meth:`join`. Packed weights stay packed.

        Args:
            words, portable: as from :meth:`join`.
            dim, sizes: of the block.
            dtype: the dtype that float32 parameters are cast to.
            view: ``Tensor.view`` with a dtype, or what computes the same.
        """
        words = words.resolve_neg()  # the memory of a lazily negated view holds the negatives
        places = self.places(dim, sizes, portable=portable)
        dtypes = dict.fromkeys(place.dtype for place in places.values())
        numbers = {each: view(words, each) for each in dtypes}
        found = {}
        for field, place in places.items():
            start = place.start * WORD.itemsize // place.dtype.itemsize
            x = numbers[place.dtype][..., start : start + math.prod(place.shape)]
            x = x.unflatten(-1, place.shape)
            found[field] = x if x.dtype == torch.bfloat16 else x.to(dtype)
        return found

    def unsupported(self, dim: int, sizes: Sequence[int]) -> str | None:
        """The reason why the kernels do not support a block of these sizes, or None if they do."""
        if _native.LIBRARY is None:
            return "the compiled kernels are missing"
        return self._refusal(self.symbols(dim, sizes))

    def refusal(self, inputs: Any) -> str | None:
        """The reason why the kernels do not support a call, or None if they do."""
        if not inputs.y.is_cpu:
            return f"tensors are on {inputs.y.device.type}"
        return self.unsupported(inputs.y.shape[-1], inputs.ints[self.first_size :])

    def run(
        self,
        y: Tensor,
        weights: Tensor,
        ints: Sequence[int],
        floats: Sequence[float],
        out: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Run the kernel and return its output tokens.

        Args:
            y: tokens [B, T, D].
            weights: the vector of a block, or [N, words] of blocks one after the other.
            ints, floats: the call's numbers.
            out: memory for the output; None for [B, T, D] of its own.
            others: the fields that neither the vector nor the numbers fill.

        Raises:
            MemoryError: a thread could not allocate its scratch memory.
        """
        if not y.numel():
            return y.new_empty(y.shape)
        y, weights = y.contiguous(), weights.contiguous()
        count = len(weights) if weights.ndim == 2 else 1
        description = self._describe(y.shape, weights.data_ptr(), count, tuple(ints), tuple(floats))
        kind = self.structure if count == 1 else self.structure * count
        problem = kind.from_buffer_copy(description)
        if count > 1:
            problem = problem[0]  # an element keeps the whole array alive
        problem.y, problem.threads = y.data_ptr(), torch.get_num_threads()
        for field, value in others.items():
            setattr(problem, field, value)
        if count > 1:
            between = y.new_empty(y.shape)
            problem.between = between.data_ptr()
        scratch = y.new_empty(call_kernel(self._scratch, problem), dtype=torch.uint8)
        # Allocated after the scratch, so that the next block's scratch fits the memory that this
        # one frees.
        out = y.new_empty(y.shape) if out is None else out
        problem.scratch, problem.out = scratch.data_ptr(), out.data_ptr()
        _native.run_kernel(self._kernel, problem)
        return out

    def symbols(self, dim: int, sizes: Sequence[int]) -> dict[str, int]:
        """All sizes of a block by their names, the derived ones included.

        Raises:
            ValueError: the sizes contradict each other.
        """
        given = dict(zip(self.sizes._fields, sizes, strict=True))
        self._check_ints({"dim": dim, **given})
        symbols = {"dim": dim, **given}
        return {**symbols, **self._derive(self.name, symbols)}

    def _check_ints(self, numbers: Mapping[str, int]) -> None:
        for name, value in numbers.items():
            least, most = self.ints.get(name, Whole(1))
            check_number(self.name, name, value, Whole(least))
            most = _LARGEST if most is None else most
            if value > most:
                raise ValueError(f"{self.name}: {name} must be in {least} … {most}, got {value}")

    def _places(self, symbols: Mapping[str, int], portable: bool = False) -> dict[str, Place]:
        packed = torch.bfloat16 if symbols["is_bfloat16"] else torch.float32
        places, start = {}, 0
        for field, part in self.parameters.items():
            if part.condition is not None and not symbols[part.condition]:
                continue
            size = shape = tuple(symbols[a] if isinstance(a, str) else a for a in part.shape)
            dtype = packed if part.is_packed else torch.float32
            if part.is_packed:
                shape = packed_shape(*size, dtype, of_block=not portable)
            places[field] = Place(start, shape, dtype, size, part.is_packed)
            start = places[field].end
        return places

    def _check(self, op: str, values: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling():  # the custom op checks the call when it runs
            return
        y, weights, ints = values["y"], values["weights"], values["ints"]
        floats = values["floats"] if "floats" in values else (values["eps"],)
        if len(ints) != len(self.ints) or len(floats) != len(self.floats):
            raise ValueError(
                f"{op}: needs {(*self.ints,)} and {(*self.floats,)}, got {ints} and {floats}"
            )
        self._check_ints(dict(zip(self.ints, ints, strict=True)))
        for (name, limits), value in zip(self.floats.items(), floats, strict=True):
            check_number(op, name, value, limits)
        dim, sizes = y.shape[-1], ints[self.first_size :]
        symbols = self.symbols(dim, sizes)
        *_, last = self._places(symbols).values()
        if weights.shape[-1] != last.end:
            raise ValueError(
                f"{op}: weights must be {last.end} words for {dim} channels and "
                f"{self.sizes(*sizes)}, got {list(weights.shape)}"
            )
        if self._further is not None:
            self._further(values, symbols)

    def describe(
        self,
        shape: Sequence[int],
        address: int,
        count: int,
        ints: Sequence[int],
        floats: Sequence[float],
        *,
        portable: bool = False,
    ) -> bytes:
        """Describe ``count`` blocks whose weights begin at an address, field by field.

        The description holds addresses only; the caller must keep the weights alive.
        """
        batch, length, dim = shape
        symbols = self.symbols(dim, ints[self.first_size :])
        values = dict(symbols, batch=batch, length=length, count=count)
        values |= dict(zip((*self.ints, *self.floats), (*ints, *floats), strict=True))
        places = self._places(symbols, portable)
        words = next(reversed(places.values())).end
        blocks = []
        for first in range(0, count * words, words):
            for field, place in places.items():
                pointer = address + WORD.itemsize * (first + place.start)
                if not place.is_packed:
                    values[field] = pointer
                    continue
                columns, inner = place.size
                values |= {f"{field}.data": pointer, f"{field}.columns": columns}
                values |= {f"{field}.inner": inner, f"{field}.in_terms": len(place.shape) == 5}
            blocks.append(self.structure.pack(*(values.get(field, 0) for field in self.fields)))
        return b"".join(blocks)


def _fields_of(kind: type[ctypes.Structure]) -> Iterator[str]:
    """The fields of a structure, those of nested structures by their path."""
    for name, field in kind._fields_:
        if issubclass(field, ctypes.Structure):
            yield from (f"{name}.{path}" for path in _fields_of(field))
        else:
            yield name


def define(op: str, *arguments: Any) -> Any:
    """Compute an op of the table by its definition."""
    return TABLE[op].definition(TABLE[op].inputs(*arguments))


def run_op(op: str, *arguments: Any) -> Any:
    """Compute an op of the table by the backend that serves its call."""
    return TABLE[op](TABLE[op].inputs(*arguments))


def flops_of(op: str, **shapes: Any) -> int:
    """FLOPs of an op of the table, given the shapes and numbers that they depend on."""
    given = TABLE[op].inputs(*[None] * TABLE[op].width)
    return TABLE[op].flops(given._replace(**shapes))
