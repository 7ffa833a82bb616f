"""`python -m vision_ttt` is the command `vision-ttt`."""

import sys

from vision_ttt_command import main

sys.exit(main())
