import torch

from hvkit.adapters.pytorch.buckets import make_buckets


def numbered(*tensors):
    return list(enumerate(tensors))


def test_gradients_lie_in_their_bucket_one_after_the_other_last_first():
    (bucket,) = make_buckets("b", "last", numbered(torch.zeros(2, 3), torch.zeros(4)), extra=1)
    bucket.pack(0, torch.ones(2, 3))
    assert not bucket.full
    bucket.pack(1, torch.arange(4.0))
    assert bucket.full
    assert bucket.flat.tolist() == [0, 1, 2, 3, 1, 1, 1, 1, 1, 1, 0]
    assert bucket.extra.shape == (1,)


def test_a_missing_gradient_counts_as_zero_also_after_a_step_that_had_one():
    (bucket,) = make_buckets("b", "last", numbered(torch.zeros(2)), extra=0)
    bucket.pack(0, torch.ones(2))
    bucket.reset()
    bucket.pack(0, None)
    assert bucket.flat.tolist() == [0, 0]


def test_dtypes_do_not_share_buckets_and_narrow_ones_travel_in_float32():
    tensors = numbered(
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.float16),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.complex64),
    )
    buckets = make_buckets("b", "last", tensors, extra=0)
    assert {tuple(sorted(b.members)): b.flat.dtype for b in buckets} == {
        (0,): torch.float64,
        (1, 2, 3, 4): torch.float32,
    }


def test_names_differ_and_only_the_last_bucket_has_the_extra_numbers():
    tensors = numbered(*(torch.zeros(1 << 18) for _ in range(8)))
    buckets = make_buckets("b", "last", tensors, extra=5)
    assert len({b.name for b in buckets}) == len(buckets) > 1
    assert [b.extra.numel() for b in buckets] == [0] * (len(buckets) - 1) + [5]
    assert 0 in buckets[-1].members
