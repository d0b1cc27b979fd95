"""The parts that the recipes share.

::

    a recipe
    ├── flags, gpt_flags        the command line
    ├── ranks           load_data() on every rank, say() on rank 0, means over ranks
    │   └── sources         loads from a folder, the cache, a download, or the bundled digits
    │       ├── mnist, cifar10      where the files are, and how to read them
    │       └── images              labelled images, and their augmentation
    ├── text            the text for the GPT recipes, from Python's own library
    ├── for_torch, for_keras    networks, and the glue to the framework
    ├── schedule        how the learning rate decays
    └── report, throughput      progress lines, hvkit.Monitor, images per second
"""

from common.flags import parse_cnn_flags, parse_flags
from common.gpt_flags import parse_gpt_flags
from common.images import augmented
from common.ranks import load_data, mean_over_ranks, parts_of_a_batch, say, stop_if_any
from common.report import Report, make_monitor
from common.schedule import MNIST_DECAY, rate_factor
from common.text import load_text
from common.throughput import Throughput, random_batch

__all__ = [
    "MNIST_DECAY",
    "Report",
    "Throughput",
    "augmented",
    "load_data",
    "load_text",
    "make_monitor",
    "mean_over_ranks",
    "parse_cnn_flags",
    "parse_flags",
    "parse_gpt_flags",
    "parts_of_a_batch",
    "random_batch",
    "rate_factor",
    "say",
    "stop_if_any",
]
