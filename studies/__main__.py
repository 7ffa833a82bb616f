"""`python -m studies COMMAND`; see :mod:`studies.main`."""

import sys

from studies.main import main

if __name__ == "__main__":  # the processes of a sweep import this module, too
    sys.exit(main())
