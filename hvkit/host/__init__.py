"""The host that a process runs on, below everything else in hvkit: nothing here starts ranks.

::

    launcher_variables   whether a launcher started this process, and as which rank
    process_lock         names that one process at a time holds
    rank_settings        the environment variables that a rank sets, with reasons
    run_reports          what a rank reports to hvkit run, through a pipe
    allocator            how much freed memory the C library keeps for a rank
    cpus                 cores, containers' limits, and a rank's share of them
    gpus                 what NVIDIA's driver reports, and which GPU a rank takes
    network              interfaces, and which names mean this host
    mca                  Open MPI's settings about networks: variables and files
    commands             short commands whose output is read
    cache                the folder for what was built or downloaded
"""
