"""``python -m hvkit``: the ``hvkit`` command of this interpreter, whichever one is on PATH."""

import sys

from hvkit.cli import main

sys.exit(main())
