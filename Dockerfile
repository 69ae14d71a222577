# syntax=docker/dockerfile:1
# Encore's server. On a CPU:   docker build -t encore .
# On NVIDIA GPUs:              docker build -t encore:cuda --build-arg ACCELERATOR=cuda \
#                                  --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 .
# Run:                         docker run --init -p 127.0.0.1:8000:8000 -v encore-cache:/var/cache/encore encore
# Settings are `encore serve` flags after the image's name, or ENCORE_* variables; the port is the variable ENCORE_PORT
# only, which the health check reads too. BASE may be any Debian or Ubuntu image whose Python is 3.11 or later.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS base
ARG ACCELERATOR=cpu
# python:* images have their Python, CUDA's don't. Triton builds its launchers with a C compiler when kernels first run.
# hadolint ignore=DL3008,SC2086
RUN packages=""; \
    python3 -c 'import ensurepip, venv' 2>/dev/null || packages="python3 python3-venv"; \
    [ "$ACCELERATOR" = cpu ] || packages="$packages gcc libc6-dev python3-dev"; \
    if [ -n "$packages" ]; then \
        apt-get update && apt-get install -y --no-install-recommends ca-certificates $packages \
        && rm -rf /var/lib/apt/lists/*; \
    fi

# What changes least comes first: torch, the other dependencies, then Encore as a wheel, which alone is a new layer of the
# image when only its sources have changed.
FROM base AS dependencies
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python3 -m venv /opt/encore
ENV PATH=/opt/encore/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
# The default index carries CUDA builds; with TORCH_INDEX empty they are taken for a CPU too.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$ACCELERATOR" = cpu ] && [ -n "$TORCH_INDEX" ]; then \
        pip install --index-url "$TORCH_INDEX" "torch==$TORCH"; \
    else \
        pip install "torch==$TORCH"; \
    fi
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
        > requirements.txt \
    && pip install "torch==$TORCH" -r requirements.txt

FROM dependencies AS wheel
COPY graph_cache graph_cache
COPY engine engine
COPY server server
RUN --mount=type=cache,target=/root/.cache/pip pip wheel --no-deps --wheel-dir /dist .

FROM base
RUN groupadd --gid 10001 encore \
    && useradd --uid 10001 --gid encore --home-dir /var/cache/encore --no-create-home --shell /usr/sbin/nologin encore \
    && install -d -o encore -g encore /var/cache/encore
COPY --from=dependencies /opt/encore /opt/encore
COPY --from=wheel /dist /dist
RUN /opt/encore/bin/pip install --no-deps --no-index --no-cache-dir /dist/*.whl
# Models, manifests and compiled kernels go to one folder, to be kept in a volume.
ENV PATH=/opt/encore/bin:$PATH \
    HOME=/var/cache/encore \
    ENCORE_CACHE=/var/cache/encore \
    ENCORE_HOST=0.0.0.0 \
    ENCORE_PORT=8000 \
    PYTHONUNBUFFERED=1
WORKDIR /var/cache/encore
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Ready, not just alive: what waits for "healthy" wants answers. Failures count once the start period is over.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"ENCORE_PORT\"]}/ready', timeout=4)"]
ENTRYPOINT ["encore", "serve"]
