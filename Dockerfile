# GPU by default; `docker build --build-arg DEVICE=cpu .` for machines without. See docs/container.md.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm
FROM ${PYTHON_IMAGE} AS build

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

ARG DEVICE=gpu
ARG EXTRAS=hf

COPY . /src
RUN /src/docker/install.sh /opt/venv "${EXTRAS}" "${DEVICE}"

FROM ${PYTHON_IMAGE}

# torch brings the CUDA libraries; the driver comes from the host through the NVIDIA container toolkit.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 1000 trainer \
    && install --directory --owner=trainer --group=trainer /workspace

COPY --from=build /opt/venv /opt/venv
COPY docker/entrypoint.sh /usr/local/bin/entrypoint

USER 1000
WORKDIR /workspace

ENTRYPOINT ["/usr/local/bin/entrypoint"]
