"""Environment variables that the package reads: a value that means nothing is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vision_ttt.errors import UserError


class EnvironmentVariableError(UserError, ValueError):
    """An environment variable has a value that is not accepted."""


def one_of(variable: str, accepted: Sequence[str]) -> str | None:
    """Return the variable's value, one of ``accepted``, or None where it is unset or empty.

    Raises:
        EnvironmentVariableError: the value is another one.
    """
    value = os.environ.get(variable) or None
    if value is not None and value not in accepted:
        names = ", ".join(accepted)
        raise EnvironmentVariableError(
            f"the environment variable {variable} must be one of {names}, got {value!r}"
        )
    return value


def whole_number(variable: str, default: int) -> int:
    """Return the variable's value, a whole number, or ``default`` where it is unset or empty.

    Raises:
        EnvironmentVariableError: the value is no whole number.
    """
    value = os.environ.get(variable)
    try:
        return int(value) if value else default
    except ValueError as error:
        raise EnvironmentVariableError(
            f"the environment variable {variable} must be a whole number, got {value!r}"
        ) from error
