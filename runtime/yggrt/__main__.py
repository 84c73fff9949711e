"""`python -m yggrt`."""

import sys

from yggrt.cli import main

sys.exit(main())
