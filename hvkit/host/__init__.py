"""The host that a process runs on, below everything else in hvkit: nothing here starts ranks.

::

    rank_variables   a rank's environment: what its launcher sets, and what it sets itself
    run_reports      reports from a rank to hvkit run, through a pipe
    hardware         CPUs, GPUs and memory, containers' limits, and what each rank uses
    network          interfaces, names of this host, and the networks that join several hosts
    mca              Open MPI's settings about networks: variables and files
    system           short commands whose output is read, locks by name, the folder of the cache
"""
