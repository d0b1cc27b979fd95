"""Scripts whose ranks wait for each other end with a sentence that names the calls and their lines.

Each script is started as a user would start it. What it does wrong is in the line that ends in
``# here``, or in the lines around it.
"""

import os
import re
import subprocess
import sys

import pytest
from cases import MORE, cases

TORCH = """
import time, torch, hvkit
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
model, optimizer = hvkit.distribute(model, optimizer)
rank, last = hvkit.rank(), hvkit.size() - 1
for step in range(12):
    loss = model(torch.ones(1, 2)).sum()
    {inside}
    loss.backward()  # backward
    optimizer.step()
{after}
"""

KERAS = """
import time, keras, numpy as np, tensorflow as tf, hvkit
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
rank, last = hvkit.rank(), hvkit.size() - 1
x, y = np.ones((64, 2), np.float32), np.ones((64, 1), np.float32)
{decorator}
def train(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)  # apply
for step in range(12):
    {inside}
    train(x, y)  # train
{after}
"""

FIT = """
import time, keras, numpy as np, hvkit
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
model.compile(optimizer, "mse")
rank, last = hvkit.rank(), hvkit.size() - 1
x, y = np.ones((64, 2), np.float32), np.ones((64, 1), np.float32)
class InFit(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        {inside}
        pass
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[InFit()])  # train
{after}
"""


def torch_script(before="", inside="pass", after=""):
    return TORCH.format(before=before, inside=inside, after=after)


def keras_script(decorator="", inside="pass", after=""):
    return KERAS.format(decorator=decorator, inside=inside, after=after)


# Other tests run beside these, so ranks that wait must leave the cores to them.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
}  # fmt: skip


MPIRUN = ("mpirun", "--oversubscribe")
GLOO = ("horovodrun", "--gloo")


def run(code, folder, ranks, words=(), launcher=MPIRUN, **settings):
    """The exit status, what was printed as an error, and the lines of the script by mark.

    Args:
        words: arguments of the script.
    """
    script = folder / "train.py"
    script.write_text(code)
    done = subprocess.run(
        [*launcher, "-np", str(ranks), sys.executable, "train.py", *words],
        cwd=folder,
        env=os.environ | ENVIRONMENT | settings,
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    lines = {
        line.rpartition("# ")[2]: f"train.py:{number}"
        for number, line in enumerate(code.splitlines(), 1)
        if "# " in line
    }
    return done.returncode, done.stderr, lines


SKIPS = "if rank == last and step == 7: continue"
LEAVES = "if rank == last and step == 7: break"
AVERAGES = "if rank == 0 and step == 7: hvkit.average(1.0)  # here"
AT_THE_END = "hvkit.average(1.0)  # here"

# What the script does, what the first rank and what the last rank is said to wait in.
UNLIKE = {
    "torch: the loop is left": (
        torch_script(inside=LEAVES, after=AT_THE_END),
        ("backward() of step 8", "backward"), ("hvkit.average", "here"),
    ),
    "torch: save on rank 0": (
        torch_script(
            before="checkpoint = hvkit.Checkpoint('ck', model=model)",
            inside="if rank == 0 and step == 7: checkpoint.save(epoch=0, step=1)  # here",
        ),
        ("Checkpoint.save", "here"), ("backward() of step 8", "backward"),
    ),
    "keras: a batch is skipped in a graph": (
        keras_script("@tf.function", inside=SKIPS, after=AT_THE_END),
        ("optimizer.apply(), step 12", "train"), ("hvkit.average", "here"),
    ),
    "keras: average on rank 0 in eager code": (
        keras_script(inside=AVERAGES),
        ("hvkit.average", "here"), ("optimizer.apply()", "apply"),
    ),
    "keras: evaluate on rank 0 in a callback": (
        FIT.format(
            inside="if rank == 0 and batch == 3: model.evaluate(x, y, verbose=0)  # here",
            after="",
        ),
        ("evaluate in fit", "here"), ("fit, step 4", "train"),
    ),
    "keras: validation data on rank 0": (
        FIT.format(inside="", after="").replace(
            "callbacks=[InFit()]", "validation_data=(x, y) if rank == 0 else None"
        ),
        ("evaluate in fit", "train"), ("fit", "train"),
    ),
}  # fmt: skip


FIRST = ["torch: the loop is left"]


@pytest.mark.parametrize("case", cases(UNLIKE, FIRST))
def test_calls_that_do_not_match_end_every_rank_with_both_lines(case, tmp_path):
    code, (first_call, first_mark), (last_call, last_mark) = UNLIKE[case]
    ranks = 3 if case == FIRST[0] else 2
    status, err, lines = run(code, tmp_path, ranks)
    assert status != 0
    same = ": every rank has to make the same calls in the same order"
    found = re.findall(rf"hvkit: RankLostError: (.*){same}$", err, re.MULTILINE)
    called = re.findall(rf"RanksDisagreeError: (.*){same}", err)
    assert len(found) + len(called) == 1, err
    sentence = [*found, *called][0]
    assert f"{first_call} ({lines[first_mark]})" in sentence, err
    assert f"{last_call} ({lines[last_mark]})" in sentence, err
    # The ranks themselves end with a line each, and one traceback at most.
    assert err.count("Traceback") == (0 if found else 1), err
    assert len(re.findall(r"hvkit: .*rank \d ends", err)) == (ranks if found else ranks - 1), err


ENDS = {
    "torch: distribute on rank 0": (
        torch_script(before="if hvkit.rank(): raise SystemExit(0)").replace(
            "hvkit.distribute(model, optimizer)", "hvkit.distribute(model, optimizer)  # here"
        ),
        "rank 0 waits in hvkit.distribute (", "; rank 1 has ended its script",
    ),
    "torch: barrier at the end on rank 0": (
        torch_script(after="if rank == 0: hvkit.barrier()  # here"),
        "rank 0 waits in hvkit.barrier (", "; rank 1 has ended its script",
    ),
    "keras: evaluate at the end on rank 0": (
        FIT.format(inside="", after="if rank == 0: model.evaluate(x, y, verbose=0)  # here"),
        "rank 0 waits in evaluate (", "; rank 1 has ended its script",
    ),
    "torch: an error on rank 1": (
        torch_script(inside="assert rank == 0 or step < 7, 'too far'").replace(
            "# backward", "# here"
        ),
        "rank 0 waits in backward() of step 8 (", "; rank 1 failed with AssertionError: too far",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", cases(ENDS, ["torch: an error on rank 1"]))
def test_a_rank_that_has_ended_is_named_at_once_with_how_it_ended(case, tmp_path):
    code, waits, ended = ENDS[case]
    status, err, lines = run(code, tmp_path, 2)
    assert status != 0
    shown = [line for line in err.splitlines() if waits in line and ended in line]
    # mpirun may be faster in ending the others after a failure.
    assert len(shown) == 1 or ("failed" in ended and not shown), err
    assert all(f"({lines['here']})" in line for line in shown)
    # The traceback is that of the rank that failed.
    assert err.count("Traceback") == ("failed" in ended), err


@MORE
def test_a_collective_on_the_way_out_hides_no_error(tmp_path):
    code = torch_script(
        before="import sys",
        inside="""try:
        assert rank == 0 or step < 7, "too far"
    finally:
        if sys.exc_info()[0]: hvkit.barrier()  # here""",
    )
    status, err, lines = run(code, tmp_path, 2)
    assert status != 0
    assert (
        f"rank 1 waits in hvkit.barrier ({lines['here']}) while handling AssertionError: too far"
    ) in err
    assert err.count("Traceback") == err.count("\nAssertionError: too far") == 1, err
    assert "hvkit: rank 1 was handling this error:" in err


@MORE
def test_a_rank_that_does_other_things_for_long_is_reported_once_and_left_alone(tmp_path):
    code = torch_script(inside="if rank == last and step == 7: time.sleep(7)  # here")
    status, err, lines = run(code, tmp_path, 2, HVKIT_STALL_SECONDS="3")
    assert status == 0, err
    text = "hvkit: rank 1 has not reached backward() of step 8"
    shown = [line for line in err.splitlines() if text in line]
    assert len(shown) == 1, err
    where = rf"\({lines['backward']}\) for \d+ s; it is .*at {lines['here']}"
    assert re.search(where, shown[0]), err


@MORE
def test_a_rank_that_never_comes_ends_the_run_after_the_long_limit(tmp_path):
    code = torch_script(inside="while rank == last and step == 7: time.sleep(0.1)  # here")
    limits = {"HVKIT_STALL_SECONDS": "5", "HVKIT_STALL_LIMIT_SECONDS": "8"}
    status, err, lines = run(code, tmp_path, 2, **limits)
    assert status != 0
    assert f"it is at {lines['here']}; rank 0 waits in backward() of step 8" in err
    assert "; the limit is 8 s" in err


@MORE
def test_an_error_ends_the_run_although_another_rank_is_stopped(tmp_path):
    stops = "if rank == last and step == 7: os.kill(os.getpid(), signal.SIGSTOP)"
    code = torch_script(
        before="import os, signal",
        inside=f'{stops}\n    if rank == 0 and step == 7: raise ValueError("boom")',
    )
    status, err, _ = run(code, tmp_path, 2, HVKIT_STALL_LIMIT_SECONDS="5", HVKIT_STALL_SECONDS="5")
    assert status != 0
    assert "ValueError: boom" in err
    assert "and Horovod does not end: ended by force" in err


@MORE
def test_ranks_that_do_not_call_hvkit_at_all_are_waited_for_aloud(tmp_path):
    code = (
        "import os, time, torch\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': time.sleep(6)\n"
        "import hvkit\n"
        "model = torch.nn.Linear(2, 1)\n"
        "hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))  # here\n"
    )
    status, err, lines = run(code, tmp_path, 2, HVKIT_STALL_SECONDS="2")
    assert status == 0, err
    assert f"a rank waits in hvkit.distribute ({lines['here']}) for ranks that have not" in err


@MORE
def test_a_wrong_argument_on_all_ranks_is_shown_by_one(tmp_path):
    code = torch_script().replace("(model, optimizer)\nrank", "(model, 'adam')\nrank")
    status, err, _ = run(code, tmp_path, 3)
    assert status != 0
    assert err.count("Traceback") == 1, err
    for rank in (1, 2):
        assert f"hvkit: rank {rank} ends with the same TypeError as rank 0" in err


OTHER_WEIGHTS = "if rank == last: self.model.set_weights([w + 1 for w in self.model.get_weights()])"


@MORE
def test_weights_that_differ_in_fit_are_shown_by_one_rank(tmp_path):
    code = FIT.format(inside=OTHER_WEIGHTS, after="")
    status, err, _ = run(code, tmp_path, 2)
    assert status != 0
    assert err.count("Traceback") == 1, err
    assert "hvkit: rank 1 ends with the same RanksDisagreeError as rank 0" in err


# Of unknown length, so that fit cannot compare it.
BATCHES = "((x[:8], y[:8]) for _ in range(7 + rank))"


@MORE
def test_ranks_that_run_out_of_data_each_show_their_line(tmp_path):
    code = FIT.format(inside="", after="").replace("fit(x, y, batch_size=8,", f"fit({BATCHES},")
    status, err, _ = run(code, tmp_path, 2)
    assert status != 0
    assert err.count("RanksDisagreeError: some ranks ran out of data") == 2, err
    assert "ends with the same" not in err


MISMATCH = """
import numpy as np, torch, hvkit
hvkit.init("torch")
from hvkit import runtime
from hvkit.watch.calls import waiting_for_all_ranks
with waiting_for_all_ranks():  # here
    runtime.engine("torch").hvd.allreduce(torch.zeros(2 + hvkit.rank()), name="sum")
"""


@MORE
def test_shapes_that_differ_are_not_called_a_lost_rank(tmp_path):
    status, err, lines = run(MISMATCH, tmp_path, 2)
    assert status != 0
    assert "RanksDisagreeError: in a collective" in err
    assert lines["here"] in err
    assert "Mismatched ALLREDUCE tensor shapes" in err
    assert "another rank has ended" not in err
