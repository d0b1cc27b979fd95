"""How ``hvkit run`` watches its ranks, whatever launcher started them.

::

    hvkit.launching.start
    ├── run_status                  what hvkit top shows: where all ranks are at one moment
    └── supervised_run              starts the launcher, decides when all ends, reports the result
        ├── supervisor              accepts the agents, collects output and failures
        │   ├── rank_output         shows whole lines and tracebacks, logs them, keeps the last ones
        │   │   └── tracebacks      finds tracebacks in output, and reads them
        │   ├── screen              writes in a thread, keeps lines apart, the launcher's output
        │   ├── timeline            the trace of all ranks, on one clock
        │   └── failures            which rank failed first, and the lines about it
        └── processes               ends processes with everything below them; signals that end
                                    hvkit run while it has no ranks

    mpirun, horovodrun
    └── agent, once per rank        runs the rank's command, sends its output and exit status
        └── processes

    agent ── protocol ── supervisor     over hvkit.connections

An agent ends its command when it loses the supervisor, the guard ends what a killed agent leaves
behind, and the supervisor ends all agents when one rank fails. So nothing remains on any host,
whichever process is killed or cut off.
"""
