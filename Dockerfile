# Encore's server. On a CPU:   docker build -t encore .
# On NVIDIA GPUs:              docker build -t encore:cuda --build-arg ACCELERATOR=cuda --build-arg BASE=$CUDA_BASE .
#     with CUDA_BASE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
# Run:                         docker run --init -p 127.0.0.1:8000:8000 -v encore-cache:/var/cache/encore \
#                                  -e ENCORE_API_KEYS=KEY encore
# The server listens on 0.0.0.0 and does not start without API keys. For a port that only this machine can reach, as above,
# --allow-unauthenticated after the image's name serves without keys.
# Settings are `encore serve` flags after the image's name, or ENCORE_* variables; the port is the variable ENCORE_PORT
# only, which the health check reads too. BASE may be any Debian or Ubuntu image whose Python is 3.11 or later.
# scripts/pin_images updates the digests of base images, scripts/lock the packages of requirements/.
ARG BASE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

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

# What changes least comes first: the dependencies, then Encore as a wheel, which alone is a new layer of the image when
# only its sources have changed. Every package is locked with its hashes, the build backend of the wheel included.
FROM base AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python3 -m venv /opt/encore
ENV PATH=/opt/encore/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements requirements
# The default index has torch with CUDA, TORCH_INDEX the CPU builds that requirements/cpu.txt names. TORCH_INDEX is empty
# where pip is configured with another source of them.
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ "$ACCELERATOR" = cpu ] && [ -n "$TORCH_INDEX" ]; then \
        pip install --require-hashes --extra-index-url "$TORCH_INDEX" -r requirements/cpu.txt; \
    else \
        pip install --require-hashes -r "requirements/$ACCELERATOR.txt"; \
    fi

FROM dependencies AS wheel
COPY pyproject.toml LICENSE ./
COPY graph_cache graph_cache
COPY engine engine
COPY server server
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM base
LABEL org.opencontainers.image.title="Encore" \
      org.opencontainers.image.description="An LLM inference server that answers by replaying captured graphs" \
      org.opencontainers.image.licenses="Apache-2.0"
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
