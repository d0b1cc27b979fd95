"""Starting ranks on this host or on several, and checking hosts before that.

``hvkit run``, from Enter to its last line::

    cli                         parses the arguments into a request, and finds the hosts:
    ├── hosts                   -H, a file of hosts, host names and addresses
    └── allocation              the batch system's hosts: Slurm, PBS, LSF, SageMaker, Kubernetes;
                                in SageMaker, all hosts but the first wait for its end
    start                       from the request to an exit status; decides about restarts
    ├── prepare                 from the request to a command line, and the variables for ranks:
    │   ├── launchers           finds mpirun or horovodrun
    │   ├── preflight           chooses the hosts with ranks, checks each, finds their networks
    │   │   ├── probe           on each host (python -m hvkit.launching.probe): its facts, and
    │   │   │                   whether it can start the command
    │   │   └── ssh             runs a command on all hosts, over ssh or Slurm's srun
    │   └── launchers           makes the command line, with an agent before each rank's command
    └── supervision/            runs that command line to its end and reports the first failure
        ├── supervisor          in this process: the TCP connections of all agents
        └── agent               on each host, one per rank: runs the command and sends its output

``hvkit hosts --check`` starts no ranks: ``hosts_check`` finds the problems of hosts, from ``hvkit
doctor`` on each, and from ``reachability``, in which every host connects to every other one.

How a failure is noticed:

- The rank is killed: its agent, the parent process, sends the exit status.
- The agent is killed, too: its connection closes without an exit status, which the supervisor
  counts as a failure. The guard, a process above each agent, kills what is left of the command.
- The host or its network is lost: no packet arrives any more. The kernel breaks the silent
  connection after ``--lost-after`` seconds, and the supervisor counts the host as lost.
- The launcher is killed: it is a child process of ``hvkit run``, which reports that.

After the first failure the other ranks get two seconds to fail by themselves. Then all agents stop,
and ``hvkit run`` names the rank that caused the other failures, which is not always the first that
was reported.
"""
