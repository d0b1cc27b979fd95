"""Records a training run, and shows it: metrics over steps, where the time goes, slow ranks.

::

    monitor               Monitor: counts a script's steps, and records them
    ├── measurements      what a rank measures; where the time of all ranks goes
    ├── pytorch           the rate, and the norm of gradients, of PyTorch's optimizers
    ├── keras             steps and metrics of fit, and the norm of gradients
    │   └── keras_on_tensorflow  the same inside graphs
    └── run_file          what rank 0 writes of a run

    recorded_run          reads what was written
    ├── terminal_report   says what it shows, and prints it
    └── report_page       the page of hvkit report --html: report_assets/
"""

from hvkit.monitor.monitor import Monitor as Monitor
