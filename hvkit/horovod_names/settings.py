"""The variables that a script's own ``hvd.init()`` sets, as ``hvkit.init`` does."""

import os
import sys

from hvkit.host.rank_variables import keep_freed_memory, rank_settings
from hvkit.log import logger

# Horovod's own check finds ranks that wait for each other: hvkit does not watch these scripts.
_STALL_CHECK = "HOROVOD_STALL_"


def apply_settings() -> None:
    """Set what is not set yet, before Horovod and MPI read it; without a GPU, keep freed memory."""
    for each in rank_settings(os.environ):
        if not each.variable.startswith(_STALL_CHECK):
            os.environ[each.variable] = each.value
            logger.debug("set %s=%s: %s", each.variable, each.value, each.reason)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.device_count():
        keep_freed_memory(os.environ)
