"""Buckets of gradients: what lies where in them, and whose memory a mean has."""

import pytest
import torch

from hvkit.frameworks.pytorch.gradients.bucket_layout import make_buckets
from hvkit.frameworks.pytorch.gradients.buckets import Bucket


def numbered(*tensors):
    return list(enumerate(tensors))


def bucket_of(*lengths, **options):
    """A bucket of parameters of these lengths."""
    zeros = (torch.zeros(length, **options) for length in lengths)
    return Bucket("b", numbered(*map(torch.nn.Parameter, zeros)))


def reduced(bucket, *gradients):
    """Set the members' gradients, which nobody else holds then, and make them the bucket's."""
    set_gradients(bucket, *gradients)
    del gradients
    kept = bucket.kept()
    bucket.pack()
    bucket.give(None, kept)


def set_gradients(bucket, *gradients):
    for p, gradient in zip(bucket._parameters, gradients, strict=True):
        p.grad = gradient


def means(bucket):
    return [p.grad.tolist() for p in bucket._parameters]


def test_gradients_lie_in_their_bucket_one_after_the_other_last_first():
    members = numbered(torch.zeros(2, 3), torch.zeros(4))
    (bucket,), report, statistics = make_buckets("b", "last", members, report=2, statistics=1)
    assert bucket.indices == [1, 0]
    set_gradients(bucket, torch.arange(4.0), torch.ones(2, 3))
    bucket.pack()
    report.values.fill_(7)
    statistics.values.fill_(8)
    assert bucket.complete
    assert bucket.flat.tolist() == [0, 1, 2, 3, 1, 1, 1, 1, 1, 1, 7, 7, 8]
    # A gradient that is missing counts as zero.
    set_gradients(bucket, None, torch.ones(2, 3))
    bucket.pack()
    assert bucket.flat[:10].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert not bucket.complete


def test_means_are_views_and_the_next_gradients_take_their_place():
    bucket = bucket_of(2, 1)
    memory = bucket.flat.data_ptr()
    for value in (1.0, 2.0):
        reduced(bucket, torch.full((2,), value), torch.full((1,), value))
        assert means(bucket) == [[value] * 2, [value]]
        assert bucket._parameters[0].grad.data_ptr() == bucket.flat.data_ptr() == memory


@pytest.mark.parametrize("keep", [lambda g: g, torch.Tensor.detach, torch.Tensor.numpy])
def test_a_mean_that_the_script_keeps_does_not_change(keep):
    bucket = bucket_of(2)
    reduced(bucket, torch.ones(2))
    held = keep(bucket._parameters[0].grad)
    reduced(bucket, torch.full((2,), 5.0))
    assert held.tolist() == [1, 1]
    assert means(bucket) == [[5, 5]]
    memory = bucket.flat.data_ptr()
    del held
    reduced(bucket, torch.full((2,), 6.0))
    reduced(bucket, torch.full((2,), 7.0))
    assert bucket.flat.data_ptr() == memory  # and later ones need no more memory


def test_a_mean_whose_data_the_script_has_replaced_is_not_given_again():
    bucket = bucket_of(2, 1)
    reduced(bucket, torch.ones(2), torch.ones(1))
    for p in bucket._parameters:
        p.grad.data = p.grad.double().float()
    reduced(bucket, torch.full((2,), 3.0), torch.full((1,), 3.0))
    assert bucket.flat.tolist() == [3, 3, 3]
    assert means(bucket) == [[3, 3], [3]]
    assert bucket._parameters[0].grad.data_ptr() == bucket.flat.data_ptr()


def test_gradients_that_are_not_reset_go_on_beside_the_bucket():
    bucket = bucket_of(2)
    reduced(bucket, torch.ones(2))
    (p,) = bucket._parameters
    for total in (2, 3, 4):
        p.grad += 1
        bucket.pack()
        p.grad += 100  # too late for this reduction, which must not see half of it
        assert bucket.flat.tolist() == [total, total]
        bucket.give(None, set())
        assert p.grad.tolist() == [total, total]


@pytest.mark.parametrize("reset", [torch.Tensor.zero_, lambda g: None])
def test_gradients_in_the_scripts_own_memory_stay_there(reset):
    bucket = bucket_of(2, 2)
    own = torch.zeros(4)
    for _ in range(2):
        reset(own)
        reduced(bucket, own[:2], own[2:])
        bucket.flat.fill_(3)
        bucket.give(None, bucket.kept())
        assert own.tolist() == [3] * 4


def test_narrow_gradients_are_copied_back():
    bucket = bucket_of(2, dtype=torch.bfloat16)
    reduced(bucket, torch.ones(2, dtype=torch.bfloat16))
    assert bucket._parameters[0].grad.dtype is torch.bfloat16
    assert means(bucket) == [[1, 1]]


def test_dtypes_do_not_share_buckets_and_narrow_ones_travel_in_float32():
    dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.float32, torch.complex64)
    tensors = numbered(*(torch.zeros(2, dtype=dtype) for dtype in dtypes))
    buckets, *_ = make_buckets("b", "last", tensors, report=0)
    assert {tuple(sorted(b.indices)): b.flat.dtype for b in buckets} == {
        (0,): torch.float64,
        (1, 2, 3, 4): torch.float32,
    }


def test_names_differ_and_only_the_last_bucket_has_the_extra_numbers():
    tensors = numbered(*(torch.zeros(1 << 18) for _ in range(8)))
    buckets, *_ = make_buckets("b", "last", tensors, report=5)
    assert len({b.name for b in buckets}) == len(buckets) > 1
    assert [b.extra.numel() for b in buckets] == [0] * (len(buckets) - 1) + [5]
    assert 0 in buckets[-1].indices


def test_large_gradients_are_scaled_while_they_are_copied():
    for length, expected in (1 << 18, [0.5, 1]), (4, [1, 2]):
        bucket = bucket_of(length, 2)
        set_gradients(bucket, torch.full((length,), 1.0), torch.full((2,), 2.0))
        bucket.pack(0.5)
        assert [bucket.flat[0].item(), bucket.flat[-1].item()] == expected


@pytest.mark.parametrize(
    ("dtype", "travels"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
    ],
)
def test_the_report_of_a_gpu_travels_in_the_hosts_memory_and_statistics_on_it(dtype, travels):
    members = numbered(torch.zeros(3, dtype=dtype, device="meta"))
    buckets, report, statistics = make_buckets("b", "last", members, report=2, statistics=5)
    assert [len(bucket.extra) for bucket in buckets] == [0, 5, 2]
    assert [b.flat.device.type for b in buckets] == ["meta", "meta", "cpu"]
    assert report.values.device.type == "cpu"
    assert (statistics.values.device.type, statistics.values.dtype) == ("meta", travels)


def test_memory_that_another_process_holds_is_not_used_again(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_shared", lambda self: True)
    bucket = bucket_of(2)
    memory = bucket.flat
    reduced(bucket, torch.ones(2))
    assert bucket.flat is not memory
    # PyTorch says so of every tensor on a GPU.
    bucket = bucket_of(2, device="meta")
    memory = bucket.flat
    for _ in range(3):
        bucket._parameters[0].grad = None
        reduced(bucket, torch.ones(2, device="meta"))
        assert bucket.flat is memory
