"""What travels to ranks and back; here from one process to another, without ranks."""

import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from hvkit.functions import pickling
from hvkit.launching.supervision.protocol import CALL_VARIABLE, call_in

SCRIPT = """
import multiprocessing, pickle, sys
from pathlib import Path
from hvkit.functions.pickling import write_call
from hvkit.launching.supervision.protocol import call_in

class Box:
    held = 5

def double(box):
    return 2 * box.held

def function():
    by_name = pickle.loads(pickle.dumps(Box)) is Box
    context = multiprocessing.get_context(sys.argv[2])
    with context.Pool(1) as pool:
        return by_name, pool.map(double, [Box()])

def send():
    with call_in(Path(sys.argv[1])).open("wb") as file:
        write_call(file, function, (), {})

if __name__ == "__main__" and sys.argv[3:] == ["from a process of its own"]:
    sending = multiprocessing.get_context("spawn").Process(target=send)
    sending.start()
    sending.join()
elif __name__ == "__main__":
    send()
"""


@pytest.mark.parametrize(
    "words", [["spawn"], ["forkserver"], ["spawn", "from a process of its own"]], ids=" ".join
)
def test_on_a_rank_main_has_what_the_call_uses_also_in_its_own_processes(tmp_path, words):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, tmp_path, *words], check=True)
    on_rank = (
        "from hvkit.functions.pickling import read_call\n"
        f"function, _, _ = read_call(open({str(call_in(tmp_path))!r}, 'rb'))\nprint(function())\n"
    )
    environ = {**os.environ, CALL_VARIABLE: str(tmp_path)}
    words = [sys.executable, "-c", on_rank]
    ran = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "(True, [10])", ran.stderr


def pickled(value):
    file = io.BytesIO()
    pickling.dump(value, file)
    return file.getvalue()


def test_a_part_of_a_tensor_travels_without_the_rest():
    row = torch.nn.Parameter(torch.arange(1e6).reshape(1000, 1000)[3])
    sent = pickled(row)
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent), row)
    assert pickle.loads(sent).requires_grad


def test_arrays_of_jax_and_tensorflow_arrive_as_numpys_and_start_neither():
    jax, tensorflow = pytest.importorskip("jax"), pytest.importorskip("tensorflow")
    arrays = {"jax": jax.numpy.arange(3, dtype="bfloat16"), "tf": tensorflow.range(3)}
    found = pickle.loads(pickled(arrays))
    assert {type(each) for each in found.values()} == {np.ndarray}
    assert all(each.tolist() == [0, 1, 2] for each in found.values())
    assert found["jax"].flags.writeable
