"""``hvkit join-checkpoint``: what it refuses. What it writes is in tests/parallel/mesh."""

import pytest
import torch

import hvkit
from hvkit.cli import main


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one process, whose parts are whole."""
    model = torch.nn.Linear(2, 2)
    return hvkit.Checkpoint(tmp_path / "run", model=model, sharded=True).save(epoch=1, step=5)


def test_one_process_writes_whole_files_which_are_copied(saved, tmp_path, capsys):
    assert main(["join-checkpoint", str(saved.parent), str(tmp_path / "out")]) == 0
    joined = tmp_path / "out" / saved.name
    assert capsys.readouterr().out == f"wrote {joined}\n"
    assert {file.name for file in joined.iterdir()} == {"manifest.json", "model.pt", "ranks.npz"}
    model = torch.nn.Linear(2, 2)
    assert hvkit.Checkpoint(tmp_path / "out", model=model).restore().step == 5
    assert torch.equal(model.weight, torch.load(saved / "model.pt")["weight"])


def test_wrong_arguments(saved, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["join-checkpoint", str(tmp_path / "missing"), str(tmp_path / "out")])
    assert "missing is not a folder" in capsys.readouterr().err

    def refused(source, out):
        assert main(["join-checkpoint", str(source), str(out)]) == 1
        return capsys.readouterr().err

    assert "holds the checkpoint itself" in refused(saved, saved.parent)
    assert "holds no checkpoint" in refused(tmp_path, tmp_path / "out")
    plain = hvkit.Checkpoint(tmp_path / "plain", model=torch.nn.Linear(2, 2))
    at = plain.save(epoch=0, step=1)
    assert "its files are plain ones already" in refused(at, tmp_path / "out")
    (saved / "model.pt").write_bytes(b"")
    assert "no complete checkpoint: model.pt has 0 of" in refused(saved, tmp_path / "out")
    assert not any((tmp_path / "out").glob("step-*"))
