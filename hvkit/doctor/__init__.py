"""``hvkit doctor``: is this machine right, and if not, what to do.

::

    examination       all of it, in order
    ├── facts         what there is: a module for each part, none of which judges
    ├── two_ranks     starts self_test, the program of the ranks
    ├── findings      what is wrong and how to mend it, from facts alone
    ├── document      all this as JSON
    └── report        the same as text

The keys of ``hvkit doctor --json``; later versions add some and take none away. Sizes are bytes,
times are seconds, and what is not there is null:

- ``format``: 1.
- ``hostname``, and ``addresses``, what it resolves to.
- ``versions``: of ``python``, ``hvkit``, ``torch``, ``tensorflow``, ``keras``, ``numpy``,
  ``horovod`` and ``mpi4py``.
- ``python``: the interpreter. ``platform``: ``system``, ``kernel``, ``machine``, ``libc``.
- ``horovod``: ``version``; ``libraries``, each with ``framework``, ``built_for``, ``error`` (why it
  does not load), ``controllers``, ``operations`` and ``mpi`` (``flavour`` and ``version``);
  ``fits``, whether hvkit would build the same here and now; ``differences``, from that.
- ``launchers``: each MPI's ``flavour``, ``version``, ``program`` and ``on_path``; ``mpi``: the
  first of them.
- ``compilers``: ``c++``, ``cmake``, ``nvcc``.
- ``cores``: ``usable``, ``host``, ``limit``. ``memory``: ``total``, ``available``.
  ``shared_memory``: ``size``, ``free``. ``limits``: ``open_files``, ``locked_memory``;
  ``infiniband``, whether there is any.
- ``gpus``: each ``index``, ``name``, ``memory``, ``driver``; ``driver_cuda`` and ``torch_cuda``,
  the CUDA versions of the driver and of PyTorch.
- ``ssh``: ``client``, ``server``, ``running``. ``interfaces``: each ``name``, ``address``,
  ``network``.
- ``threads``: settings of numbers of threads; ``environment``: names of other variables.
- ``self_test``: ``launcher``, ``error``, ``ranks``, ``bytes`` of the array, ``rounds``, and
  ``results``, each with ``framework``, ``command``, ``error``, ``output`` (last lines of one that
  failed), ``seconds`` of one allreduce (median), and ``bandwidth``, bytes by seconds.
- ``problems`` and ``notes``: each ``what`` and ``fix``.
"""
