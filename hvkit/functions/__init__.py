"""Functions on ranks: ``hvkit.launch``, and what it shares with ``hvkit.spark``.

::

    launch               hvkit.launch: from the arguments to the ranks' results or an error
    ├── pickling         what travels: functions and classes of cells, tensors of GPUs
    │   └── cells        names and lines of a notebook's cells
    ├── streams          shows the run's output, and passes Ctrl-C on
    ├── starter          a process of its own (python -m hvkit.functions.starter), which starts and
    │                    supervises the ranks as hvkit run does
    └── outcomes         the files with what ranks have returned or raised
    rank                 what each rank runs (python -m hvkit.functions.rank)

The supervision needs a process of its own: it handles signals and runs an event loop, for which the
main thread of a notebook's kernel is not free. ``hvkit.host.call_folder`` has the files' names.
"""
