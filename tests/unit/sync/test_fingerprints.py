"""Which tensors fingerprints distinguish, and the messages when those of the ranks differ."""

import itertools
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from hvkit.frameworks.pytorch import fingerprints as of_tensors
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, describe_differences, fingerprint, of_gradients


def in_torch(array):
    return of_tensors.fingerprints_of([_tensor(array)])[0]


def in_torch_together(array):
    """As for a GPU's tensors, between others of the same dtype and of another one."""
    tensor = _tensor(array)
    others = [tensor.reshape(-1)[:3].clone(), torch.arange(5)]
    flats = [of_tensors._flat(each) for each in [others[0], tensor, others[1], others[0]]]
    return of_tensors.rows_together(flats, len(flats))[1]


def _tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


WAYS = pytest.mark.parametrize("row_of", [fingerprint, in_torch, in_torch_together])
DTYPES = ["float32", "float64", "float16", "complex64", "complex128", "int64", "int8", "bool"]


def values(dtype, n=100):
    return np.random.default_rng(0).normal(size=n).astype(dtype)


@WAYS
@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16])
def test_every_element_counts(row_of, dtype):
    array = values(dtype)
    rows = {row_of(array).tobytes()}
    for i in range(len(array)):
        other = array.copy()
        other.view(np.uint8)[i * array.itemsize] ^= 1
        rows.add(row_of(other).tobytes())
    assert len(rows) == len(array) + 1


@WAYS
def test_exchanged_elements_and_rows_change_the_hash(row_of):
    array = values("float32", 64).reshape(8, 8)
    others = [array[::-1], array.T, array[:, ::-1], np.roll(array, 1)]
    bits = {row_of(np.ascontiguousarray(each))[0] for each in [array, *others]}
    assert len(bits) == 5


@WAYS
def test_exchanged_blocks_change_the_hash(row_of, monkeypatch):
    for module in (fingerprints, of_tensors):
        monkeypatch.setattr(module, "BLOCK", 16)
    array = values("float32", 64)
    exchanged = np.concatenate([array[16:32], array[:16], array[32:]])
    assert row_of(array)[0] != row_of(exchanged)[0]
    assert np.isclose(row_of(array)[2:].view(np.float64)[0], (array.astype(float) ** 2).sum())


@WAYS
def test_equal_bits_have_equal_hashes_also_of_nan(row_of):
    array = np.array([np.nan, np.inf, -0.0], np.float32)
    assert (row_of(array) == row_of(array.copy())).all()
    assert row_of(array)[0] != row_of(np.array([np.nan, np.inf, 0.0], np.float32))[0]
    assert (row_of(np.empty(0, np.float32)) == 0).all()


@WAYS
@pytest.mark.parametrize("distance", [1e-6, 1e-3, 1.0])
def test_the_projections_estimate_the_distance_of_tensors(row_of, distance):
    random = np.random.default_rng(1)
    array = values("float64", 1000)
    estimates = []
    for _ in range(100):
        step = random.normal(size=array.shape)
        step *= distance * np.linalg.norm(array) / np.linalg.norm(step)
        rows = np.stack([row_of(array), row_of(array + step)])
        estimates.append(fingerprints._distance(rows))
    assert 0.8 < np.sqrt(np.mean(np.square(estimates))) / distance < 1.2


@WAYS
@pytest.mark.parametrize("n", [1, 2, 3, 7, 39, 1000])
def test_the_same_change_of_every_element_is_not_rounding(row_of, n):
    array = values("float32", n)
    rows = np.array([[row_of(array)], [row_of(array + 1)]])
    assert describe_differences(rows, [Compared("bias", 2.0**-23)], exact=False)[1]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_compared_by_indices_and_values(layout):
    one, two, three = torch.zeros(4, 4), torch.zeros(4, 4), torch.zeros(4, 4)
    one[1, 2], two[2, 1], three[1, 2] = 1, 1, 2
    kinds = [each.to_sparse(layout=layout) for each in (one, two, three, one.clone())]
    rows = [of_tensors.fingerprints_of([each])[0].tobytes() for each in kinds]
    assert len(set(rows)) == 3
    assert rows[3] == rows[0]


def test_expanded_and_strided_tensors_equal_contiguous_ones():
    plain = torch.ones(4, 3)
    for alike in (torch.ones(1, 3).expand(4, 3), torch.ones(3, 4).t(), torch.ones(8, 3)[::2]):
        rows = of_tensors.fingerprints_of([alike, plain])
        assert np.array_equal(*rows)


# Messages.


def message_about(*ranks, exact=False, unit=2.0**-23):
    """The message about tensors "a", "b"... that the ranks hold."""
    everyone = np.array([[fingerprint(np.asarray(each)) for each in held] for held in ranks])
    compared = [Compared(label, unit) for label, _ in zip("abcd", ranks[0], strict=False)]
    return describe_differences(everyone, compared, exact)


ONES = np.ones(50, np.float32)


def test_the_message_names_the_first_difference_and_the_ranks():
    assert message_about(*[[ONES, ONES * 2]] * 3, exact=True) == ("", False)
    text, error = message_about([ONES, ONES, ONES], [ONES, ONES * 2, ONES], [ONES, ONES, ONES * 3])
    assert error
    assert text.startswith("b of rank 1 differs from that of rank 0 by about ")
    text, _ = message_about([ONES], *[[ONES * 2]] * 7)
    assert text.startswith("a of ranks 1-7 differs")


def test_rounding_is_an_error_before_the_first_update_only():
    next_to = np.nextafter(ONES, 2)
    text, error = message_about([ONES], [next_to], exact=True)
    assert "put back a copy of the weights" in text
    assert error
    assert "loaded or changed" in message_about([ONES], [ONES * 1.001], exact=True)[0]
    text, error = message_about([ONES], [next_to])
    assert "rounding" in text
    assert not error
    # An error in a later tensor is named first.
    text, error = message_about([ONES, ONES], [np.nextafter(ONES, 2), ONES * 1.01])
    assert error
    assert text.startswith("b of rank 1")


def test_dtypes_with_few_digits_round_further():
    array = values(ml_dtypes.bfloat16)
    next_to = (array.view(np.uint16) + 1).view(array.dtype)
    assert message_about([array], [next_to], unit=2.0**-23)[1]
    assert not message_about([array], [next_to], unit=2.0**-7)[1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_unknown_distance_is_an_error(value):
    other = ONES.copy()
    other[3] = value
    text, error = message_about([ONES], [other])
    assert error
    assert "by about" not in text
    assert message_about([ONES * 0], [ONES])[1]
    assert message_about([np.arange(5)], [np.arange(5) + 1])[1]


def test_zero_and_infinite_gradients_are_not_compared():
    assert of_gradients([fingerprint(ONES), fingerprint(ONES * 0)])[1] == 1
    for silent in ([], [ONES * 0], [ONES, ONES * np.nan], [ONES, ONES * np.inf]):
        assert of_gradients([fingerprint(each) for each in silent])[1] == 0


def test_a_gpu_computes_the_same_of_many_tensors_together(monkeypatch):
    monkeypatch.setattr(of_tensors, "_TOGETHER", 3 << 20)
    lengths = [0, 1, 7, 8192, 8193, 100_000]
    dtypes = [*(getattr(torch, d) for d in (*DTYPES, "bfloat16", "uint8", "uint16")), *FLOAT8]
    large = itertools.product([(1 << 20) + 5, 3 << 20], [torch.float32, torch.bfloat16])
    tensors = [
        _tensor(values("float32", n)).mul(50).to(dtype)
        for n, dtype in (*itertools.product(lengths, dtypes), *large)
    ]
    flats = [of_tensors._flat(each) for each in tensors]
    together = of_tensors.rows_together(flats, len(flats))
    for one, other in zip(of_tensors.fingerprints_of(tensors), together, strict=True):
        assert one[0] == other[0]
        assert np.allclose(one[1:].view(np.float64), other[1:].view(np.float64), 1e-12, 1e-9)


def test_a_gpu_keeps_no_copies_beyond_those_that_it_hashes_together(monkeypatch):
    monkeypatch.setattr(of_tensors, "_TOGETHER", 4 << 10)
    monkeypatch.setattr(of_tensors, "BLOCK", 1 << 10)
    made, alive = [], []

    def copies():
        for _ in range(20):
            array = np.ones(1 << 10, np.float32)
            made.append(weakref.ref(array))
            yield torch.from_numpy(array)
            del array
            alive.append(sum(each() is not None for each in made))

    of_tensors.rows_together(copies(), 20)
    assert max(alive) <= 5  # one has no more room


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
