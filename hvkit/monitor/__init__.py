"""Records how a training run goes, and shows it: numbers a step, where its time goes, slow ranks.

``monitor`` has the public ``Monitor``, ``keras`` and ``pytorch`` what it does in each; the others
measure (``step_clock``, ``host_load``), do the arithmetic (``step_shares``), write
(``records``, ``run_file``, ``writers``), read (``recorded_run``) and show (``report``,
``comparison``; ``report_page`` with ``curves`` and ``charts``).
"""

from hvkit.monitor.monitor import Monitor as Monitor
