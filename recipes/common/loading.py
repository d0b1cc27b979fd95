"""The images of a recipe, the same on every rank."""

from dataclasses import replace

import hvkit
from common import sources
from common.cifar10 import Cifar10
from common.cnn_flags import CnnFlags
from common.flags import DRY_RUN_STEPS, Flags
from common.images import DataError, Dataset
from common.mnist import Mnist
from common.ranks import say, stop_if_any


def load_data(flags: Flags) -> Dataset:
    """The same images on every rank, downloaded once per host if they must be.

    If any rank has no images, or others than rank 0, all ranks end, and rank 0 says why.
    """
    source = Cifar10() if isinstance(flags, CnnFlags) else Mnist()
    data, problem = None, None
    first_on_host = hvkit.local_rank() == 0
    if first_on_host:
        data, problem = _try_to_load(source, flags, download=True)
    stop_if_any(problem)
    if not first_on_host:
        data, problem = _try_to_load(source, flags, download=False)
    stop_if_any(problem)
    assert data is not None
    digest = data.digest()
    digest_of_0, origin_of_0 = hvkit.broadcast((digest, data.origin))
    step = flags.batch_size * hvkit.size()
    if digest != digest_of_0:
        problem = f"its images ({data.origin}) are not those of rank 0 ({origin_of_0})"
    elif len(data.train) < step:
        problem = (
            f"{len(data.train)} training images are too few for one step of {step}, "
            f"{flags.batch_size} on each of {hvkit.size()} ranks: use a smaller --batch-size"
        )
    elif len(data.test) < hvkit.size():
        problem = f"{len(data.test)} test images are too few for {hvkit.size()} ranks"
    stop_if_any(problem)
    return replace(data, train=data.train.first(DRY_RUN_STEPS * step)) if flags.dry_run else data


def _try_to_load(
    source: sources.Source, flags: Flags, download: bool
) -> tuple[Dataset | None, str | None]:
    """The images, or what is wrong."""
    try:
        return sources.load(source, flags.dataset, flags.data_dir, download=download, say=say), None
    except (DataError, OSError) as error:
        return None, str(error)
