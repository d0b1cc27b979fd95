"""The GPT recipes end to end, in the meshes that two ranks can form and in none."""

import functools
import re
import shutil

import pytest
from cases import MORE, cases
from launching import ALONE, MPIRUN, start

SMALL = (
    *("--layers", "2", "--width", "32", "--heads", "2", "--length", "32", "--steps", "60"),
    *("--log-interval", "30", "--test-batch-size", "256"),
)
PIPELINE = "--mesh pipeline=2 --batch-size 16"
OTHERS = ["--mesh tensor=2 --batch-size 16", "--mesh shard=2 --batch-size 8", "--batch-size 8"]


def gpt(launcher, *flags, recipe="gpt_torch"):
    return start(launcher, recipe, *SMALL, *flags)


@functools.cache
def in_one_process():
    return gpt(ALONE, "--batch-size", "16")


def held_out(run):
    """The loss on the held-out text."""
    return float(re.search(r"^held-out loss (\S+)$", run.out, re.MULTILINE)[1])


@pytest.mark.parametrize("flags", cases([PIPELINE, *OTHERS]))
def test_two_ranks_train_the_model_of_one_process(flags):
    alone, together = in_one_process(), gpt(MPIRUN, *flags.split())
    of_frequencies = float(re.search(r"frequency: (\S+)$", alone.out, re.MULTILINE)[1])
    assert held_out(alone) < of_frequencies - 0.2
    assert held_out(together) == pytest.approx(held_out(alone), abs=2e-3)
    assert ("stage 1: " in together.err) == ("pipeline=2" in flags)
    assert together.said_more_than_once == []
    assert len(re.findall("^sampled: ", together.out, re.MULTILINE)) == 1


@MORE
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_a_pipeline_of_keras_trains_on_as_one_process_does(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    saved = "--checkpoint-dir", str(tmp_path)
    keras = functools.partial(gpt, recipe="gpt_keras")
    fewer = "--steps", "30", "--log-interval", "15"
    together = keras(MPIRUN, *PIPELINE.split(), *fewer, *saved)
    of_frequencies = float(re.search(r"frequency: (\S+)$", together.out, re.MULTILINE)[1])
    assert held_out(together) < of_frequencies - 0.1
    assert "stage 1: " in together.err
    assert together.said_more_than_once == []
    # One process takes the second half of the steps, and ends with the model of both stages.
    shutil.rmtree(tmp_path / "step-000000030")
    resumed = keras(ALONE, "--batch-size", "16", *fewer, *saved)
    assert "step 15/30" not in resumed.out
    assert held_out(resumed) == pytest.approx(held_out(together), abs=2e-3)


@MORE
def test_a_run_in_a_pipeline_is_resumed_by_one_process(tmp_path):
    folder = tmp_path / "checkpoints"
    saved = ("--checkpoint-dir", str(folder), "--save-every", "30")
    order = "--schedule", "1F1B", "--microbatches", "2"
    whole = gpt(MPIRUN, *PIPELINE.split(), *order, *saved)
    assert held_out(whole) == pytest.approx(held_out(in_one_process()), abs=2e-3)
    shutil.rmtree(folder / "step-000000060")
    resumed = gpt(ALONE, "--batch-size", "16", *saved)
    assert "step 30/60" not in resumed.out
    assert held_out(resumed) == pytest.approx(held_out(whole), abs=2e-3)


@MORE
def test_a_mesh_of_another_number_of_ranks_is_told_once_for_all():
    run = start(MPIRUN, "gpt_torch", "--mesh", "pipeline=3", fails=True)
    assert run.err.count("--mesh: Mesh(data=-1, pipeline=3, tensor=1, shard=1) needs a number") == 1
