"""Records a training run, and shows it: metrics over steps, where the time goes, slow ranks.

::

    monitor               Monitor: measures a script's steps, and records them
    ├── keras             in Keras: epochs and metrics of fit
    │   ├── keras_graphs      its steps in graphs of TensorFlow, and gradients
    │   ├── keras_on_pytorch  the same on PyTorch
    │   └── keras_on_jax      its steps compiled by XLA
    ├── pytorch           in PyTorch: gradients
    ├── step_times        how long steps take, and where the time of all ranks goes
    ├── host_load         the load of this host
    ├── records           what a record holds
    ├── run_file          what rank 0 writes of a run
    └── writers           writes to metrics.jsonl, TensorBoard, and the script's hook

    recorded_run          reads what was written
    ├── terminal_report   shows a run in the terminal
    ├── comparison        shows several runs side by side
    └── report_page       the page of hvkit report --html
        └── charts        its charts, and which numbers belong on one
"""

from hvkit.monitor.monitor import Monitor as Monitor
