"""What hvkit raises.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``. Everything else is here::

    RuntimeError
    └── HvkitError
        ├── HorovodNotFoundError   several ranks were launched, no usable Horovod
        ├── LaunchError            ranks cannot be started as asked, or not as many as asked were
        ├── HostfileError          a hostfile or a list of hosts cannot be read
        ├── RankLostError          another rank has ended, or waits in another call
        ├── RanksDisagreeError     the ranks did not pass the same model or arguments
        └── BuildError             Horovod could not be built or installed
"""


class HvkitError(RuntimeError):
    """Base of hvkit's own errors."""


class HorovodNotFoundError(HvkitError):
    """Several ranks were launched, but there is no Horovod for the framework in use."""


class LaunchError(HvkitError):
    """Ranks cannot be started as asked, or Horovod sees another number than were launched."""


class HostfileError(HvkitError, ValueError):
    """A hostfile or a list of hosts is not what it should be; the message names file and line."""


class RanksDisagreeError(HvkitError, ValueError):
    """The ranks called with different models, optimizers or arguments."""


class RankLostError(HvkitError):
    """This rank waits for another one that has ended, or that waits in another call."""


class BuildError(HvkitError):
    """Horovod could not be built or installed; the message says why and what to do."""
