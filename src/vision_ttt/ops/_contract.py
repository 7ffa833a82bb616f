"""The contract of an op's arguments: a table of shapes and ranges, and its checker.

Kernels compute addresses from shapes and numbers, so a :class:`Contract` checks all arguments
before a kernel runs. The public function applies the contract; its errors name the received and the
accepted values. The custom op applies it, too, because compiled and exported programs call the
custom op directly. Every call and every backward pass check that no storage has been freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from vision_ttt.ops._backend import autocast_kind, is_transformed
from vision_ttt.ops._shapes import Axis, Shape, axis_text, bind, parse_axis, shape_text

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that ops accept. Kernels support fewer."""

MOST_SIGNATURES = 1024
"""The number of accepted calls that a contract remembers."""


class Whole(NamedTuple):
    """An int from ``least`` to ``most``: a number, the symbol of a size, or None for no limit."""

    least: int
    most: int | str | None = None


class Real(NamedTuple):
    """A number of at least ``least`` that float32 can hold."""

    least: float


LARGEST_REAL = torch.finfo(torch.float32).max


class Flag(NamedTuple):
    """True or False."""


class _Row(NamedTuple):
    name: str
    shapes: tuple[Shape, ...]
    optional: bool


def _row(name: str, text: str) -> _Row:
    optional = text.startswith("?")
    shapes = text.removeprefix("?").split("|")
    return _Row(name, tuple(tuple(map(parse_axis, shape.split())) for shape in shapes), optional)


class Contract:
    """The shapes, dtypes, devices and ranges that an op accepts.

    A shape has a symbol per axis, and a symbol stands for one size in all shapes. ``"R*D"`` is a
    product, ``"H d | B H d"`` a choice, ``"... D"`` accepts any leading axes, ``"? C"`` accepts
    None. The name of a whole number is a symbol, too.

    Args:
        op: the op's public name, for messages.
        tensors: tensor → its shape. All tensors must be on the first one's device.
        numbers: number → its range.
        odd: symbols of sizes that must be odd.
        alike: tensors that must have the first one's dtype.
        autocast: whether active autocast casts the tensors of ``alike`` itself.
        together: tensors that must be given all or none.
        dtypes: tensor → the dtypes that it must have, whatever the first one's is.
        dense_last: tensors whose last axis must be contiguous.
        may_be_0: symbols of sizes that may be 0. Leading axes matched by ``...`` may be 0, too.
        others: arguments between the tensors and the numbers that the table does not check.
        further: (op, arguments by name): raises an error for what the table cannot express.
    """

    def __init__(
        self,
        op: str,
        tensors: Mapping[str, str],
        numbers: Mapping[str, Whole | Real | Flag] | None = None,
        *,
        odd: Sequence[str] = (),
        alike: Sequence[str] = (),
        autocast: bool = False,
        together: Sequence[str] = (),
        dtypes: Mapping[str, Sequence[torch.dtype]] | None = None,
        dense_last: Sequence[str] = (),
        may_be_0: Sequence[str] = "B",
        others: Sequence[str] = (),
        further: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.op = op
        self.tensors = dict(tensors)
        self.numbers = dict(numbers or {})
        self.others, self.further = tuple(others), further
        self.names = (*tensors, *self.others, *self.numbers)
        self.odd, self.alike, self.together = tuple(odd), tuple(alike), tuple(together)
        self.autocast, self.dtypes = autocast, dict(dtypes or {})
        self._dense_last_places = [self.names.index(name) for name in dense_last]
        self.may_be_0 = tuple(may_be_0)
        self._rows = self._solvable([_row(*item) for item in tensors.items()])
        self._accepted: dict[tuple[Any, ...], dict[Any, Any]] = {}

    def backward(
        self,
        grads: Mapping[str, str],
        kept: Mapping[str, str] | None = None,
        may_be_0: Sequence[str] | None = None,
    ) -> Contract:
        """The contract of the op's backward pass.

        Args:
            grads: gradients of the results → their shapes. They precede the op's tensors.
            kept: saved tensors → their shapes. They follow the op's tensors.
            may_be_0: as of the contract, whose symbols are the default.
        """
        return Contract(
            f"{self.op}_backward",
            {**grads, **self.tensors, **(kept or {})},
            self.numbers,
            odd=self.odd,
            alike=self.alike,
            together=self.together,
            may_be_0=self.may_be_0 if may_be_0 is None else may_be_0,
            others=self.others,
            further=self.further,
        )

    def _solvable(self, rows: list[_Row]) -> list[_Row]:
        """The rows in an order in which at most one factor of each product is unknown."""
        known, ordered = set(self.numbers), []

        def unknown(row: _Row) -> set[Axis]:
            return {a for shape in row.shapes for a in shape if isinstance(a, str)} - known

        def is_solvable(row: _Row) -> bool:
            products = (a for shape in row.shapes for a in shape if isinstance(a, tuple))
            return all(sum(f not in known and not f.isdecimal() for f in p) < 2 for p in products)

        while rows:
            row = next(filter(is_solvable, rows))
            rows.remove(row)
            ordered.append(row)
            if len(row.shapes) == 1 and not row.optional:
                known |= unknown(row)
        return ordered

    def check(self, arguments: Sequence[Any], plain: bool = False) -> dict[Any, Any]:
        """Raise an error unless the arguments, in the order of ``names``, meet the contract.

        A model repeats its calls, and for small images all checks together would take longer than
        the kernels. If the types, shapes, dtypes, devices and numbers of a call were accepted
        before, only its storages and strides are checked.

        Args:
            arguments: the arguments.
            plain: whether it is known that no tracer is active, nor autocast that casts tensors.

        Returns:
            The cache of this call signature. A caller may add values to it that depend only on the
            signature.

        Raises:
            TypeError: an argument's type or dtype is not accepted.
            ValueError: a shape, device, stride or number is not accepted, or a tensor's storage
                has been freed.
        """
        modes = None
        if not plain:
            if torch.compiler.is_compiling():
                self._check_table(self._by_name(arguments))
                self._check_strides(arguments)
                return {}
            if self.autocast:
                modes = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        key = (
            modes,
            *[
                (x.shape, x.dtype, x.layout, x.device)
                if isinstance(x, Tensor)
                else (type(x), tuple(x) if isinstance(x, list) else x)  # the dispatcher makes lists
                for x in arguments
            ],
        )
        try:
            known = self._accepted.get(key)
        except TypeError:  # an argument has no hash, such as a symbolic size
            known, key = None, None
        if known is None:
            self._check_table(self._by_name(arguments))
            known = {}
            if key is not None:
                if len(self._accepted) >= MOST_SIGNATURES:
                    self._accepted.clear()
                self._accepted[key] = known
        self.check_storages(arguments)
        if self._dense_last_places:
            self._check_strides(arguments)
        return known

    def check_storages(self, arguments: Sequence[Any]) -> None:
        """Raise an error if the storage of a tensor among the first arguments has been freed.

        Raises:
            ValueError: a storage has been freed.
        """
        try:
            for x in arguments[: len(self.tensors)]:  # inlined: every call runs this loop
                if x is not None and not x.untyped_storage().nbytes() and x.numel():
                    break
            else:
                return
        except NotImplementedError:  # a tensor has no storage: check the others
            pass
        check_storages(self.op, dict(zip(self.tensors, arguments, strict=False)))

    def _check_strides(self, arguments: Sequence[Any]) -> None:
        for place in self._dense_last_places:
            x = arguments[place]
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                raise ValueError(
                    f"{self.op}: {self.names[place]}'s last axis must be contiguous, "
                    f"got strides {x.stride()}"
                )

    def _by_name(self, arguments: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, arguments, strict=True))

    def _check_table(self, values: Mapping[str, Any]) -> None:
        if len({values[name] is None for name in self.together}) > 1:
            raise ValueError(f"{self.op}: give both {' and '.join(self.together)}, or neither")
        known: dict[str, Any] = {}
        for name, limits in self.numbers.items():
            check_number(self.op, name, values[name], limits)
            known[name] = values[name]
        first: tuple[str, Tensor] | None = None
        for name, shapes, optional in self._rows:
            x = values[name]
            if x is None and optional:
                continue
            if not isinstance(x, Tensor):
                raise TypeError(f"{self.op}: {name} must be a tensor, got {type(x).__name__}")
            shape = next((shape for shape in shapes if bind(x.shape, shape, known)), None)
            if shape is None:
                accepted = " or ".join(shape_text(shape, known) for shape in shapes)
                raise ValueError(
                    f"{self.op}: {name} must have shape {accepted}, got {list(x.shape)}"
                )
            for axis, size in zip(reversed(shape), reversed(x.shape), strict=False):
                if size == 0 and axis not in ("...", *self.may_be_0):
                    raise ValueError(
                        f"{self.op}: {axis_text(axis, {})} must be at least 1, "
                        f"got {name} {list(x.shape)}"
                    )
            first = first or (name, x)
            if x.device != first[1].device:
                raise ValueError(
                    f"{self.op}: {name} is on {x.device}, {first[0]} on {first[1].device}"
                )
        self._check_dtypes(values)
        for name in self.odd:
            if known[name] % 2 == 0:
                raise ValueError(f"{self.op}: {name} must be odd, got {known[name]}")
        for name, limits in self.numbers.items():
            if isinstance(limits, Whole) and limits.most is not None:
                most = known[limits.most] if isinstance(limits.most, str) else limits.most
                if not limits.least <= known[name] <= most:
                    raise ValueError(
                        f"{self.op}: {name} must be in {limits.least} … {most}, got {known[name]}"
                    )
        if self.further is not None:
            self.further(self.op, values)

    def _check_dtypes(self, values: Mapping[str, Any]) -> None:
        leader, *_ = self.tensors
        first = values[leader]
        will_be_cast = self.autocast and torch.is_autocast_enabled(autocast_kind(first))
        for name in self.tensors:
            x = values[name]
            if x is None:
                continue
            accepted = self.dtypes.get(name, FLOATS)
            if x.dtype not in accepted:
                raise TypeError(f"{self.op}: {name} must be one of {accepted}, got {x.dtype}")
            if x.layout != torch.strided:
                raise TypeError(f"{self.op}: {name} must be a strided tensor, got {x.layout}")
            if name in self.dtypes or x.dtype == first.dtype:
                continue
            if name in self.alike and will_be_cast and torch.float64 not in (first.dtype, x.dtype):
                continue  # autocast leaves float64 as it is
            if name in self.alike:
                raise TypeError(
                    f"{self.op}: {leader} and {name} must share a dtype, "
                    f"got {first.dtype} and {x.dtype}"
                )
            if x.dtype == torch.float64:
                raise TypeError(f"{self.op}: {name} is float64, {leader} is not ({first.dtype})")


def check_number(op: str, name: str, value: Any, limits: Whole | Real | Flag) -> None:
    """Raise an error unless value has the type of ``limits`` and is in its range.

    The contract checks a range that ends at a tensor's size itself, after it has bound the size.
    """
    if isinstance(limits, Flag):
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} must be a bool, got {value!r}")
        return
    if isinstance(limits, Whole):
        accepted, kinds = "an int", (int, torch.SymInt)
    else:
        accepted, kinds = "a number", (int, float, torch.SymInt, torch.SymFloat)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be {accepted}, got {value!r}")
    ends_at_a_size = isinstance(limits, Whole) and limits.most is not None
    if not ends_at_a_size and not value >= limits.least:  # NaN is not
        raise ValueError(f"{op}: {name} must be at least {limits.least}, got {value}")
    if isinstance(limits, Real) and value > LARGEST_REAL:
        raise ValueError(f"{op}: {name} must be at most {LARGEST_REAL}, got {value}")


def check_storages(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise an error if the storage of a non-empty tensor has been freed.

    FSDP frees the storages of parameters between the passes that use them, but keeps the tensors.
    A kernel that reads such a tensor crashes the process.

    Raises:
        ValueError: a storage has been freed.
    """
    for name, x in tensors.items():
        if x is not None and _is_freed(x):
            raise ValueError(
                f"{op}: {name} {list(x.shape)} has no memory: its storage has been freed, as FSDP"
                " does with parameters outside of their module's passes"
            )


def _is_freed(x: Tensor) -> bool:
    try:
        return not x.untyped_storage().nbytes() and x.numel() > 0
    except NotImplementedError:  # no storage at all, as within torch.func's transforms
        return False


def check_whole_numbers(op: str, name: str, x: Any, tokens: Tensor) -> None:
    """Raise an error unless x holds an integer for each sequence of tokens [B, …], on their device.

    Raises:
        TypeError: x is not a strided tensor of int32 or int64.
        ValueError: its shape is not [B], or it is on another device.
    """
    # When positions are computed, narrower dtypes would overflow and unsigned ones wrap below 0.
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{op}: {name} must be a tensor of int32 or int64, got {kind}")
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a strided tensor, got {x.layout}")
    if list(x.shape) != [len(tokens)]:
        raise ValueError(f"{op}: {name} must have shape [{len(tokens)}], got {list(x.shape)}")
    if x.device != tokens.device:
        raise ValueError(f"{op}: {name} is on {x.device}, the tokens on {tokens.device}")


def check_range(op: str, name: str, x: Tensor, most: int) -> None:
    """Raise an error unless all numbers of x are in 0 … most.

    The check is skipped where the numbers cannot be read, see :func:`is_readable`.

    Raises:
        ValueError: a number is not in the range, or x's storage has been freed.
    """
    if not is_readable(x):
        return
    check_storages(op, {name: x})
    if not all(0 <= value <= most for value in x.tolist()):
        raise ValueError(f"{op}: {name} must be in 0 … {most}, got {x.tolist()}")


def is_readable(x: Tensor) -> bool:
    """Whether the numbers of x can be read without waiting.

    Returns False for a tensor on a device, for a fake tensor, while torch.compile traces, and
    inside a torch.func transform, because under vmap one tensor holds the numbers of all calls.
    """
    return not (
        x.device.type != "cpu"
        or torch.compiler.is_compiling()
        or isinstance(x, FakeTensor)
        or is_transformed()
    )
