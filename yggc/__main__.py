"""`python -m yggc`."""

import sys

from yggc.cli import main

sys.exit(main())
