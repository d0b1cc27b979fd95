"""Every rank's part of a keras.utils.PyDataset."""

import json

import keras
import numpy as np
import pytest
from shards import check_exact, check_training, every_length, every_size, flat, numbers, parts


class Counting(keras.utils.PyDataset):
    """Batches of 4 of the samples 0, 1, 2, ..."""

    def __init__(self, length, wrap=lambda rows: rows, **options):
        super().__init__(**options)
        self.order, self.wrap, self.begun = np.arange(length), wrap, 0

    def __len__(self):
        return -(-len(self.order) // 4)

    def __getitem__(self, index):
        return self.wrap(self.order[4 * index : 4 * index + 4])

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.array([index])


def batches(part):
    return numbers(part[index] for index in range(len(part)))


@every_size
@every_length
def test_steps_are_those_of_one_process(length, size):
    ranks = parts(lambda: Counting(length), size)
    check_training([batches(rank) for rank in ranks], list(range(length)), 4)
    exact = parts(lambda: Counting(length), size, exact=True)
    check_exact([batches(rank) for rank in exact], list(range(length)))


def test_targets_weights_and_named_inputs_stay_together():
    def wrap(rows):
        return {"a": rows, "b": np.stack([rows, rows], 1)}, rows, keras.ops.convert_to_tensor(rows)

    for part in parts(lambda: Counting(7, wrap), 3):
        x, y, weights = part[len(part) - 1]
        assert x["a"].shape == (3,)
        assert x["b"].tolist() == [[row, row] for row in y]
        assert x["a"].tolist() == y.tolist() == np.asarray(weights).tolist()


def test_epoch_hooks_run_with_the_same_random_numbers_on_every_rank():
    def make():
        np.random.rand()
        return Counting(50)

    ranks = parts(make, 3)
    (one,) = parts(make, 1)
    orders = []
    for _ in range(2):
        before = np.random.get_state()[1].tolist()
        for part in (one, *ranks):
            part.on_epoch_begin()
            part.on_epoch_end()
        assert np.random.get_state()[1].tolist() == before
        orders.append(flat(batches(one)))
        check_training([batches(rank) for rank in ranks], orders[-1], 4)
    assert orders[0] != orders[1]
    assert one._inner.begun == 2


class Ragged(Counting):
    """Batches whose samples have another length each time, as padded sentences have."""

    def __getitem__(self, index):
        return np.full((4 - index % 2, 5 + index), index), np.full(4 - index % 2, index)


def test_batches_of_samples_of_different_shapes_stay_whole():
    def rows(part):
        return [(x.shape, int(y[0])) for x, y in (part[index] for index in range(len(part)))]

    whole = rows(Ragged(20))
    ranks = [rows(part) for part in parts(lambda: Ragged(20), 3)]
    assert [each for step in zip(*ranks, strict=True) for each in step] == [*whole, whole[3]]
    exact = [rows(part) for part in parts(lambda: Ragged(20), 3, exact=True)]
    assert exact == [whole[rank::3] for rank in range(3)]


def epochs(part, number):
    for _ in range(number):
        part.on_epoch_begin()
        yield flat(batches(part)), np.random.rand()
        part.on_epoch_end()


def test_one_process_draws_what_it_draws_without_hvkit_also_when_it_resumes():
    np.random.seed(1)
    plain = list(epochs(Counting(22), 4))
    np.random.seed(1)
    (part,) = parts(lambda: Counting(22), 1, seed=None)
    seen = list(epochs(part, 2))
    assert seen == plain[:2]
    state, generator = part.state_dict(), np.random.get_state()
    (resumed,) = parts(lambda: Counting(22), 1, seed=None)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    np.random.set_state(generator)
    resumed.on_epoch_end()  # as fit does before its first epoch
    assert seen + list(epochs(resumed, 2)) == plain
    assert resumed.begun == 2  # other attributes are the original's


def test_an_infinite_pydataset_stays_infinite_on_every_rank():
    ranks = parts(Endless, 3)
    assert [part.num_batches for part in ranks] == [None] * 3
    assert [int(part[5][0]) for part in ranks] == [15, 16, 17]


@pytest.mark.parametrize("workers", [1, 2])
def test_fit_trains_on_it(workers):
    def wrap(rows):
        return rows[:, None].astype("float32"), rows.astype("float32")

    options = {"workers": workers, "use_multiprocessing": False, "max_queue_size": 7}
    (part, _) = parts(lambda: Counting(21, wrap, **options), 2)
    assert {name: getattr(part, name) for name in options} == options
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(part, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * len(part) == 6
