import os
import subprocess
import sys

RESTORES = """
import types, jax, numpy as np, hvkit
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
run = types.SimpleNamespace(w=jax.device_put(np.arange(4.0), rows))
hvkit.Checkpoint("run", run=run).save(epoch=0, step=0)
run.w = jax.device_put(np.zeros(4), rows)
hvkit.Checkpoint("run", run=run).restore()
assert run.w.sharding == rows, run.w.sharding
assert run.w.tolist() == [0, 1, 2, 3]
"""


def test_an_array_on_several_devices_of_one_process_comes_back_there(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", RESTORES]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
