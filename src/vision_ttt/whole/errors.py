"""The errors of whole pictures that whoever runs them can mend."""

from vision_ttt.errors import UserError


class WholePictureError(UserError, ValueError):
    """A picture, its scratch folder or the memory does not fit; the message says what would."""
