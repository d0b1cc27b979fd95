"""``python -m hvkit.cli``: runs the hvkit of this interpreter, whichever one is on PATH."""

import sys

from hvkit.cli import main

sys.exit(main())
