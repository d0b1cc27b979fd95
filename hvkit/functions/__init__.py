"""Functions on ranks: ``hvkit.launch``, and what it shares with ``hvkit.spark``.

::

    launch               hvkit.launch: from the arguments to the ranks' results or an error
    ├── pickling         what travels: functions and classes of cells, values, tensors
    │   └── keras_objects    models of Keras, with the script's own classes in them
    └── supervised       the process that supervises the ranks: its start, output, end and results
        └── outcomes     the files with what ranks have returned or raised
    rank                 what each rank runs (python -m hvkit.functions.rank)

``hvkit.launching.supervision.protocol`` has the names of the files between these processes.
"""
