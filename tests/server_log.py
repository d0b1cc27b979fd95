"""A log of what a parameter server adds, in its order; on ranks, on rank 0 only."""

from typing import NamedTuple

import numpy as np

from hvkit.strategies import parameter_server
from hvkit.strategies.parameter_server import ServedWeights
from hvkit.sync.parameter_server_thread import PUSH, Server


class Update(NamedTuple):
    rank: int
    clock: int  # the rank's steps since the last collective of all ranks, with this one
    lead: int  # by how many steps it was ahead of the slowest rank when it began this one, at least
    changes: list[np.ndarray]  # of each vector, before the division by the number of ranks


def logged(monkeypatch):
    """The list to which everything is added from now on."""
    log, pending, away = [], {}, set()
    act, push, add = Server._act, ServedWeights.push, parameter_server.add

    def acts(server, rank, number, kind, arrays):
        if kind == PUSH:
            server._attendance.train(rank)
            away.clear()
            away.update(server._attendance.away)
        act(server, rank, number, kind, arrays)

    def pushes(weights, rank, changes):
        lead = weights.lead(rank, away)
        pending[id(changes)] = Update(rank, weights.clocks[rank] + 1, lead, changes)
        push(weights, rank, changes)

    def adds(weights, changes, size):
        update = pending.pop(id(changes))
        log.append(update._replace(changes=[each.copy() for each in changes]))
        add(weights, changes, size)

    monkeypatch.setattr(Server, "_act", acts)
    monkeypatch.setattr(ServedWeights, "push", pushes)
    monkeypatch.setattr(parameter_server, "add", adds)
    return log
