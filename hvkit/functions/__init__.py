"""Functions on ranks: ``hvkit.launch``, and what it shares with ``hvkit.spark``.

::

    launch               hvkit.launch: from the arguments to the ranks' results or an error
    ├── pickling         what travels: functions and classes of cells, values
    │   ├── host_arrays      tensors of GPUs, parts of tensors, arrays of JAX and TensorFlow
    │   ├── keras_objects    models of Keras, with the script's own classes in them
    │   └── cells        names and lines of a notebook's cells
    ├── supervised       the process that supervises the ranks: its start, end and results
    │   └── outcomes     the files with what ranks have returned or raised
    ├── streams          shows that process's output, and passes Ctrl-C on
    └── starter          that process (python -m hvkit.functions.starter), like hvkit run
    rank                 what each rank runs (python -m hvkit.functions.rank)
    children             the main module of processes that a rank starts

The supervision needs a process of its own: it handles signals and runs an event loop, for which the
main thread of a notebook's kernel is not free. ``hvkit.host.call_folder`` has the files' names.
"""
