"""What hvkit raises.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``. Everything else is here::

    RuntimeError
    └── HvkitError
        ├── HorovodNotFoundError   several ranks were launched, no usable Horovod
        ├── LaunchError            the launcher and Horovod disagree about the ranks
        ├── RankLostError          another rank has ended, or waits elsewhere, while this one waits
        ├── RanksDisagreeError     the ranks did not pass the same model or arguments
        └── BuildError             Horovod could not be built or installed
"""


class HvkitError(RuntimeError):
    """Base of hvkit's own errors."""


class HorovodNotFoundError(HvkitError):
    """Several ranks were launched, but there is no Horovod for the framework in use."""


class LaunchError(HvkitError):
    """The number of launched processes and the number of ranks that Horovod sees differ."""


class RanksDisagreeError(HvkitError, ValueError):
    """The ranks called with different models, optimizers or arguments."""


class RankLostError(HvkitError):
    """Another rank has ended, with an error or with fewer batches, while this one waits for it."""


class BuildError(HvkitError):
    """Horovod could not be built or installed; the message says why and what to do."""
