"""The position of a loader, resumed on any number of ranks."""

import pytest
from loaders import Batches, Counting, epoch, loader
from shards import (
    check_training,
    flat,
    numbers,
    parts,
)
from torch.utils.data import (
    DataLoader,
)


@pytest.mark.parametrize(
    ("before", "after", "taken", "workers"),
    [(2, 2, 0, 0), (2, 2, 1, 0), (2, 3, 3, 0), (3, 1, 1, 0), (1, 5, 3, 0), (2, 3, 3, 2)],
)
def test_a_position_is_resumed_on_any_number_of_ranks(before, after, taken, workers):
    make = loader(101, shuffle=True, num_workers=workers)
    (one,) = parts(loader(101, batch=1, shuffle=True), 1)
    first, second, third = [flat(numbers(one)) for _ in range(3)]
    stopped = parts(make, before)
    states = []
    for rank in stopped:
        list(rank)
        batches = iter(rank)
        for _ in range(taken):
            next(batches)
        states.append(rank.state_dict())
    samples = taken * 4 * before
    assert states == [{"epoch": 1, "samples": samples}] * before
    ranks = parts(make, after)
    for rank in ranks:
        rank.load_state_dict(states[0])
    check_training(epoch(ranks), second[samples:], 4)
    assert {str(rank.state_dict()) for rank in ranks} == {"{'epoch': 2, 'samples': 0}"}
    check_training(epoch(ranks), third, 4)
    assert first != second


def test_resuming_reads_none_of_the_samples_that_are_done():
    (one,) = parts(loader(20), 1)
    one.load_state_dict({"epoch": 0, "samples": 12})
    list(one)
    assert one.dataset.read == list(range(12, 20))


def test_a_position_at_the_end_gives_nothing_and_then_the_next_epoch():
    ranks = parts(loader(10), 2)
    for rank in ranks:
        for _ in rank:
            state = rank.state_dict()
    assert state == {"epoch": 0, "samples": 10}
    ranks = parts(loader(10), 3)
    for rank in ranks:
        rank.load_state_dict(state)
        assert list(rank) == []
    check_training(epoch(ranks), list(range(10)), 4)


def test_a_position_in_a_batch_samplers_order_is_resumed():
    def make():
        return DataLoader(Counting(23), batch_sampler=Batches([4] * 5 + [3]))

    ranks = parts(make, 3)
    for rank in ranks:
        rank.load_state_dict({"epoch": 0, "samples": 8})
    check_training(epoch(ranks), list(range(8, 23)), 4)


def test_a_broken_off_iteration_is_followed_by_the_next_epoch():
    (one,) = parts(loader(50, shuffle=True), 1)
    (whole,) = parts(loader(50, shuffle=True), 1)
    next(iter(one))
    list(whole)
    assert flat(numbers(one)) == flat(numbers(whole))


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": -1, "samples": 0}, {"epoch": "1"}])
def test_a_wrong_state_is_an_error(state):
    (one,) = parts(loader(10), 1)
    with pytest.raises(ValueError, match="must be what its state_dict"):
        one.load_state_dict(state)


def test_an_epoch_that_was_left_can_be_taken_for_done():
    (one,) = parts(loader(20, shuffle=True), 1)
    for number, _ in enumerate(one):
        if number == 1:
            break
    assert one.state_dict() == {"epoch": 0, "samples": 8}
    one.end_epoch()
    assert one.state_dict() == {"epoch": 1, "samples": 0}
    (resumed,) = parts(loader(20, shuffle=True), 1)
    resumed.load_state_dict(one.state_dict())
    assert flat(numbers(resumed)) == flat(numbers(one))
    one.end_epoch()  # which came to its end by itself
    assert one.state_dict() == {"epoch": 2, "samples": 0}


def test_an_epoch_that_goes_on_is_not_done():
    (one,) = parts(loader(20), 1)
    for _ in one:
        one.end_epoch()
    assert one.state_dict() == {"epoch": 1, "samples": 0}
