"""DataLoaders whose samples are their numbers."""

from shards import numbers
from torch.utils.data import DataLoader, Dataset, Sampler


class Counting(Dataset):
    """Samples 0, 1, 2, ...; remembers which were read."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return index


def loader(length, batch=4, **options):
    return lambda: DataLoader(Counting(length), batch_size=batch, **options)


def epoch(ranks):
    return [numbers(rank) for rank in ranks]


class Batches(Sampler):
    """Batches of given sizes over 0, 1, 2, ..."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return len(self.sizes)

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


class Backwards(Sampler):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length - 1, -1, -1))
