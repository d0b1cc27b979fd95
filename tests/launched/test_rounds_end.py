"""How scripts end while an agreement runs beside training."""

from test_ranks_that_wait import run

# Rank 1 ends its round when rank 0 has ended its script.
LATE = """
import sys, time, torch
import hvkit
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvkit.distribute(model, optimizer, strategy=hvkit.DiLoCo(4, overlap=2))
for step in range(4):
    if hvkit.rank() == 1 and step == 3:
        time.sleep(2)
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("rank", hvkit.rank(), "ends", file=sys.stderr, flush=True)
"""


def test_a_rank_that_ends_first_waits_for_the_agreement(tmp_path):
    status, err, _ = run(LATE, tmp_path, 2)
    assert status == 0, err
    assert all(f"rank {rank} ends\n" in err for rank in (0, 1)), err
