"""Items of the data that cannot be read: the run stops at the first, or counts them and goes on."""

import logging
from collections.abc import Mapping
from typing import Any

_LOGGER = logging.getLogger(__name__)


class DamagedItems:
    """The damaged items that a run has met."""

    def __init__(self, skip: bool, names: list[str] | None = None) -> None:
        """Raise at the first one unless `skip`; `names` are those met before."""
        self.skip = skip
        self.names = [] if names is None else names

    def check(self, batch: Mapping[str, Any]) -> None:
        """Add a batch's damaged items to `names`, and log each once.

        Raises:
            DamagedItem: there is one, and it is not to be skipped.
        """
        for error in batch["damaged"]:
            if not self.skip:
                error.name_flag()
                try:
                    raise error
                finally:
                    # The error refers to this frame; a cycle would keep all that lies above it.
                    del error
            if error.name not in self.names:
                self.names.append(error.name)
                _LOGGER.warning("skipped: %s", error)
