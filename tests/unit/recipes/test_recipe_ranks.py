"""Every rank gets the same images, or all ranks end with the reason."""

import common
import pytest

import hvkit


def flags(*arguments):
    return common.parse_flags("A recipe.", arguments)


@pytest.mark.parametrize(
    ("parts", "means", "result"),
    [
        ((6.0, 3, 4), {"loss": 1.5, "accuracy": 0.75}, (1.5, 0.75)),
        ((0.0, 0, 0), {}, (2.0, 0.5)),  # a rank without test images counts for nothing
    ],
)
def test_results_of_unequal_parts_are_weighted_by_their_images(monkeypatch, parts, means, result):
    def average(own, weight):
        assert (own, weight) == (means, parts[2])
        return {"loss": 2.0, "accuracy": 0.5} | own

    monkeypatch.setattr(hvkit, "average", average)
    assert common.mean_over_ranks(*parts) == result


def test_too_large_a_batch_ends_with_what_there_is_and_the_fix(capsys):
    with pytest.raises(SystemExit) as end:
        common.load_data(flags("--dataset", "digits", "--batch-size", "2000"))
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "1437 training images are too few for one step of 2000" in said
    assert "smaller --batch-size" in said


def test_missing_data_ends_with_the_reason_alone(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        common.load_data(flags("--data-dir", str(tmp_path)))
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no train-images-idx3-ubyte")


def ranks_that_hold(monkeypatch, digest):
    """Rank 1 of two, whose rank 0 holds images with ``digest``."""
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    monkeypatch.setattr(hvkit, "size", lambda: 2)
    monkeypatch.setattr(hvkit, "broadcast", lambda obj: (digest, "MNIST from elsewhere"))
    problems = []
    monkeypatch.setattr(hvkit, "allgather", lambda obj: problems.append(obj) or [None, obj])
    return problems


def test_a_rank_with_other_images_than_rank_0_ends_the_run(monkeypatch):
    problems = ranks_that_hold(monkeypatch, digest="another")
    with pytest.raises(SystemExit):
        common.load_data(flags("--dataset", "digits"))
    assert "not those of rank 0 (MNIST from elsewhere)" in problems[-1]


def test_a_dry_run_trains_on_the_images_of_three_steps():
    whole = common.load_data(flags("--dataset", "digits", "--batch-size", "10"))
    short = common.load_data(flags("--dataset", "digits", "--batch-size", "10", "--dry-run"))
    assert len(short.train) == 30
    assert short.train.pixels.tobytes() == whole.train.pixels[:30].tobytes()
    assert len(short.test) == len(whole.test)
