"""``__main__`` in processes that a rank's function starts with multiprocessing, such as workers.

With ``spawn`` and ``forkserver`` multiprocessing runs the main module again in each process, as
``__mp_main__``. ``hvkit.functions.pickling`` names this module as that of a rank: it has the
functions and classes of the caller's ``__main__`` that the rank has.
"""

from __future__ import annotations

import os
from pathlib import Path

from hvkit.functions.pickling import read_main
from hvkit.host.call_folder import VARIABLE, call_in

if __name__ == "__mp_main__":
    with call_in(Path(os.environ[VARIABLE])).open("rb") as call:
        globals().update(read_main(call))
