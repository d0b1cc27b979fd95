"""Scripts whose workers start afresh, beside an InfiniBand adapter, with and without a guard."""

import sys

import pytest
from cases import cases
from launching import MPIRUN, run

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import hvkit
from hvkit.data import pytorch_loader

pytorch_loader.ADAPTERS = Path(sys.argv[1])

def main():
    hvkit.init()
    loader = hvkit.shard(DataLoader(TensorDataset(torch.arange(12.0)), 2, num_workers=1))
    print(f"hvkit:{sum(float(x.sum()) for (x,) in loader):g}", flush=True)

"""
GUARD = 'if __name__ == "__main__":\n    main()\n'


@pytest.mark.parametrize("guarded", cases([False, True]))
def test_a_script_without_a_guard_gets_an_error_that_names_it(tmp_path, guarded):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + (GUARD if guarded else "main()\n"))
    status, out, err = run([*MPIRUN, sys.executable, str(script), str(tmp_path)], 170)
    if guarded:
        assert status == 0, err
        assert sorted(out.split()) == ["hvkit:30", "hvkit:36"]
        assert err.count("multiprocessing's forkserver starts the workers of DataLoaders") == 1
    else:
        assert status != 0
        assert "LaunchError: the DataLoader's workers could not start: " in err
        assert 'put the script\'s main code under if __name__ == "__main__"' in err
