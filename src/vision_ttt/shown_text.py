"""Text of others, shown without doing anything to where it is shown."""

import re

_ACTING = re.compile(
    # All control characters but the line's end and the tab, those that turn the direction of
    # writing, and two more ends of lines.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def shown(text: str) -> str:
    """Return a text whose control characters are written as JSON has them, such as ``\\u001b``.

    Names of classes, files and datasets may hold any: a terminal would obey them.
    """
    return _ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
