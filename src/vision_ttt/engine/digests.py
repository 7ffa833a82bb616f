"""The SHA-256 of a file that stands in the file itself.

It is the digest of the whole file with the digest's own 64 characters set to zeros, so that no byte
can change unnoticed, and so that a file and its digest always come from the same write. The digest
stands as an entry of a JSON text at the beginning of the file, written without spaces.
"""

KEY = "sha256"
"""The digest's key in the JSON text."""
ZEROS = "0" * 64
"""What stands in the digest's place while the file is hashed."""


def entry(digest: str) -> bytes:
    """Return the digest's entry as it stands in the JSON text.

    The same characters within a JSON string have their quotes escaped, so the entry is unique.
    """
    return f'"{KEY}":"{digest}"'.encode()


def with_digest(start: bytes, digest: str) -> bytes:
    """Return the beginning of a file, which holds `ZEROS`, with `digest` in its place."""
    return start.replace(entry(ZEROS), entry(digest), 1)


def without_digest(start: bytes, digest: str) -> bytes:
    """Return the beginning of a file with its `digest` set to zeros, as it is hashed."""
    return start.replace(entry(digest), entry(ZEROS), 1)
