"""Attacks of SECURITY.md that no other test makes."""

import json
import os
import pickle
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import MORE

import hvkit
from hvkit.checkpoint import store
from hvkit.cli import main
from hvkit.spark.task import Front, Store

PLANTED = "planted-3f9c2a"
SECRETS = {
    name: f"{PLANTED}-{number}"
    for number, name in enumerate(
        ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "NCCL_PASSWORD", "HVKIT_RUN_KEY")
    )
}
ROOT = Path(__file__).parents[2]
SLURM = "manifest", "slurm", "-np", "2", "--slots", "2"


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def saved(folder):
    model = torch.nn.Linear(2, 2)
    checkpoint = hvkit.Checkpoint(folder, model=model)
    return checkpoint, checkpoint.save(epoch=1, step=1)


def resealed(folder):
    """Write the manifest for the files that are there, as an attacker can."""
    body = json.loads((folder / store.MANIFEST).read_text())
    del body["sha256"]
    body["files"] = {name: store.facts_of(folder / name) for name in body["files"]}
    store.Manifest(**body).write(folder)


def pickled_model(folder, evil):
    torch.save({"weight": evil}, folder / "model.pt")


def plain_pickle(folder, evil):
    (folder / "model.pt").write_bytes(pickle.dumps(evil))


def array_of_objects(folder, evil):
    np.savez(folder / "ranks.npz", **{"0/random/python": np.array([evil], object)})


@pytest.mark.parametrize("attack", [pickled_model, plain_pickle, array_of_objects])
def test_a_checkpoint_runs_no_code_when_it_is_loaded(attack, tmp_path):
    checkpoint, folder = saved(tmp_path / "runs")
    attack(folder, Evil(tmp_path / "attacked"))
    resealed(folder)
    with pytest.raises(Exception, match=r"does not fit|pickle|object|not a file in the archive"):
        checkpoint.restore()
    assert not (tmp_path / "attacked").exists()


def more(*words):
    """One more command, for ``make test-all``."""
    return pytest.param(words, marks=MORE)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """``run(*words)``: the status of a command in an empty folder, and what it printed."""
    monkeypatch.chdir(tmp_path)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    def run(*words):
        try:
            status = main(list(words))
        except SystemExit as end:
            status = end.code
        said = capfd.readouterr()
        return status, said.out, said.err

    return run


@pytest.mark.parametrize(
    "words",
    [
        more("run", "-np", "2", "--dry-run", "true"),
        ("run", "-np", "2", "--dry-run", "-x", "HF_TOKEN", "true"),
        ("run", "-np", "2", "--dry-run", "-x", f"MY_SECRET={PLANTED}", "true"),
        more("run", "-np", "1", "--verbose", "true"),
        ("doctor", "--json", "--no-self-test"),
        more("doctor", "--no-self-test"),
        more("hosts", "-H", "localhost:2"),
        (*SLURM, "true"),
    ],
    ids=lambda words: " ".join(words).replace(PLANTED, "..."),
)
def test_printed_output_has_no_secrets(words, run):
    _, out, err = run(*words)
    assert out + err
    assert PLANTED not in out + err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "-np", "1", "-H", "node1;touch attacked", "true"),
        ("run", "-np", "1", "-H", "-oProxyCommand=touch attacked", "true"),
        more("run", "-np", "1", "-H", "$(touch attacked):1", "true"),
        ("run", "-np", "1", "--hostfile", "hosts", "true"),
        ("run", "-np", "1", "-x", "A;touch attacked=1", "true"),
        more("run", "-np", "1", "--interfaces", "eth0;touch attacked", "true"),
        (*SLURM, "--name", "a\ntouch attacked", "true"),
        more(*SLURM, "--time", "1:00\ntouch attacked", "true"),
    ],
    ids=lambda words: repr(words[-2]),
)
def test_no_argument_becomes_a_command(words, tmp_path, run):
    (tmp_path / "hosts").write_text("`touch attacked` slots=1\nnode2;touch attacked slots=1\n")
    status, _, err = run(*words)
    assert status
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts"]


def test_words_of_a_slurm_script_stay_words(run):
    status, out, err = run(*SLURM, "--", "echo", "$(touch attacked)", "; touch attacked")
    assert status == 0, err
    last = out.strip().splitlines()[-1]
    assert last.endswith("echo '$(touch attacked)' '; touch attacked'")


def test_another_user_of_a_host_changes_nothing_in_the_store_of_sparks_ranks(monkeypatch):
    store = Store("127.0.0.1", b"key")
    front = Front(("127.0.0.1", store.port), b"key")
    place = f"http://127.0.0.1:{front.port}/global/0"
    request = urllib.request.Request(place, b"address", method="PUT")
    user = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: user + 1)  # to whom this test is another user
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(place)
    assert urllib.request.urlopen(request).status == 200
    front.close()
    store.close()


def test_every_threat_has_a_test():
    """The tests that SECURITY.md names exist."""
    text = (ROOT / "SECURITY.md").read_text()
    named = {word.strip("`") for word in text.split() if word.startswith("`tests/")}
    assert len(named) > 10
    for each in named:
        file, _, name = each.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), each
