"""A checkpoint that is loaded before its model is divided."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import hvkit
from hvkit.frameworks.pytorch.model_parallel.mesh_checkpoints import MeshSync


def test_after_an_error_in_a_load_no_other_one_waits():
    options = SimpleNamespace(mesh=None, position=SimpleNamespace(rank=0))
    sync = MeshSync(hvkit.Synchronous(), None, options, [])
    of_part = Mock(state=dict, rank_state=dict, load_state=Mock(side_effect=ValueError("damaged")))
    sync.load_state({}, in_round=True)
    sync.load_rank_state({})
    with pytest.raises(ValueError, match="call model"):
        sync.rank_state()
    sync.divided(of_part, Mock(), [], 1)
    with pytest.raises(ValueError, match="damaged"):
        sync.load_pending()
    assert sync.rank_state() == {}
