"""``python -m hvkit.cli``: hvkit of this very interpreter, whatever is on PATH."""

import sys

from hvkit.cli import main

sys.exit(main())
