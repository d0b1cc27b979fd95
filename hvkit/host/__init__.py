"""The host that a process runs on, below everything else in hvkit: nothing here starts ranks.

::

    launcher_variables   whether a launcher started this process, and as which rank
    process_lock         locks by name, which a process holds until it ends
    rank_settings        the environment variables that a rank sets, with reasons
    run_reports          reports from a rank to hvkit run, through a pipe
    call_folder          a function for ranks, and what each has returned, in files
    cpus                 cores, containers' limits, and a rank's share of them
    gpus                 the GPUs of NVIDIA's driver, and which one a rank uses
    network              interfaces, and which names refer to this host
    mca                  Open MPI's settings about networks: variables and files
    commands             short commands whose output is read
    cache                the folder for builds and downloads
"""
