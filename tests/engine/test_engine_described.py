"""JSON that anybody may have written: no deeper, and of no other type, than is accepted."""

from typing import Any

import pytest

from vision_ttt.engine.described import (
    DEEPEST,
    check_number,
    check_numbers,
    check_texts,
    check_whole_numbers,
    read_json,
)
from vision_ttt.engine.section import FRACTION


def test_json_is_read_to_a_depth() -> None:
    whole = "[" * DEEPEST + "]" * DEEPEST
    assert read_json(whole.encode()) == read_json(whole)
    assert read_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    with pytest.raises(ValueError, match=f"nested deeper than {DEEPEST} levels"):
        read_json(f'{{"a": {whole}}}')
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match="Expecting value"):
        read_json("")


@pytest.mark.parametrize(
    ("check", "value", "kind"),
    [
        (check_texts, ["a", 1], "a list of texts"),
        (check_texts, "ab", "a list of texts"),
        (check_texts, {"a": 1, "b": 2}, "a list of texts"),
        (check_texts, None, "a list of texts"),
        (check_whole_numbers, [1, 2.0], "a list of whole numbers"),
        (check_whole_numbers, [1, True], "a list of whole numbers"),
        (check_whole_numbers, [1, "2"], "a list of whole numbers"),
    ],
)
def test_what_is_no_list_of_a_kind(check: Any, value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"x is .*; {kind} is needed"):
        check("x", value, 2)


def test_lists_of_another_length() -> None:
    check_texts("x", ["a", ""], 2)
    check_whole_numbers("x", [1, -2], 2)
    with pytest.raises(ValueError, match="x has 1 entries; 2 are needed"):
        check_texts("x", ["a"], 2)


def test_numbers_of_a_range() -> None:
    check_numbers("x", [1, 0.5], 2, FRACTION)
    check_number("x", 1, FRACTION, whole=True)
    for value in ([1, 2], [1, 0], [1, float("nan")]):
        with pytest.raises(ValueError, match=r"x\[1\] is .*; it must be above 0 and at most 1"):
            check_numbers("x", value, 2, FRACTION)
    for value in (["a", 1], [None, 1], [True, 1]):
        with pytest.raises(TypeError, match="a list of numbers is needed"):
            check_numbers("x", value, 2, FRACTION)
    with pytest.raises(TypeError, match=r"x is 0\.5; a whole number is needed"):
        check_number("x", 0.5, FRACTION, whole=True)
