"""What tests look for on hosts."""

import time


def said(host, *command, **options):
    """What a command wrote that has to succeed."""
    done = host.run(command, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def becomes_true(condition, seconds=20):
    """Whether a condition holds within some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
