"""How processes are started: what launchers leave in the environment."""
