"""What the recipes share: flags, images, learning-rate schedules, and the report of a run."""

from common.augment import augmented
from common.cnn_flags import parse_cnn_flags
from common.flags import parse_flags
from common.loading import load_data
from common.ranks import mean_over_ranks, say, stop_if_any
from common.report import Report
from common.schedule import MNIST_DECAY, rate_factor
from common.throughput import Throughput, random_batch

__all__ = [
    "MNIST_DECAY",
    "Report",
    "Throughput",
    "augmented",
    "load_data",
    "mean_over_ranks",
    "parse_cnn_flags",
    "parse_flags",
    "random_batch",
    "rate_factor",
    "say",
    "stop_if_any",
]
