"""`python -m realhf.cli` is the command `realhf`."""

import sys

from realhf.cli import main

sys.exit(main())
