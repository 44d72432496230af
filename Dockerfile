# syntax=docker/dockerfile:1
# GPU by default; `docker build --build-arg DEVICE=cpu .` for machines without. See docs/running/container.md.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
FROM ${PYTHON_IMAGE} AS dependencies

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# the build of torch: cpu, or the CUDA of PyTorch's index
ARG DEVICE=cu130
ARG EXTRAS=hf

# what changes seldom: gigabytes of dependencies
COPY pyproject.toml constraints.txt /src/
COPY docker/install.sh docker/requirements.py /src/docker/
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    /src/docker/install.sh /opt/venv "${EXTRAS}" "${DEVICE}" dependencies

# what changes often: the package, 3 MB compressed, beside what it needs
FROM dependencies AS package

COPY LICENSE README.md hatch_build.py /src/
COPY conf /src/conf
COPY recipes /src/recipes
COPY lightning_pp /src/lightning_pp
RUN --mount=type=cache,target=/root/.cache/pip,sharing=locked \
    PREFIX=/opt/package /src/docker/install.sh /opt/venv "${EXTRAS}" "${DEVICE}" package

FROM ${PYTHON_IMAGE}

LABEL org.opencontainers.image.title="lightning_pp" \
      org.opencontainers.image.description="Pipeline parallelism for unmodified LightningModules" \
      org.opencontainers.image.licenses="Apache-2.0"

# tini passes signals on and collects processes that were left; strategy.compile=true needs g++; NCCL needs libibverbs
# for InfiniBand, else it uses TCP. Debian has one version of each for each release
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 tini \
    && apt-get clean \
    && rm -rf /var/cache/apt /var/cache/debconf /var/lib/apt/lists /var/log/apt /var/log/dpkg.log

# torch brings the CUDA libraries; the driver comes from the host through the NVIDIA container toolkit. Any user may run
# the image: it needs no entry in /etc/passwd, since HOME and USER are given.
ENV HOME=/home/trainer \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    USER=trainer

RUN useradd --home-dir /home/trainer --no-create-home --uid 1000 trainer \
    && install --directory --mode=1777 /home/trainer /workspace

# two layers: a change of the code pushes the second alone
COPY --from=dependencies /opt/venv /opt/venv
COPY docker/entrypoint.sh /usr/local/bin/entrypoint
COPY docker/smoke.sh /usr/local/bin/smoke
COPY --from=package /opt/package /opt/venv

ARG REVISION=unknown
LABEL org.opencontainers.image.revision="${REVISION}"

USER 1000
WORKDIR /workspace

ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/entrypoint"]
