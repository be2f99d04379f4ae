# syntax=docker/dockerfile:1
# inferd as an image: the wheel with its compiled gateway and kernels, and what it needs to serve, for a user without
# privileges on a root that cannot be written. docs/kubernetes.md has the commands.
#
#   docker build -t inferd:0.1.0 .
#   docker build -t inferd:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml CMakeLists.txt README.md LICENSE constraints.txt ./
COPY kernels kernels
COPY compiled compiled
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels --config-settings=cmake.define.INFERD_COMPILE=ON .

FROM python:${PYTHON}-slim-bookworm AS packages
# Another index gives another build of torch: the CPU's is the default, and some 3 GB smaller than CUDA's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# llm generates texts, onnx and sklearn predict, postgres and redis are for several gateways.
ARG EXTRAS=llm,onnx,sklearn,vision,postgres,redis,signing
COPY constraints.txt /build/
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/inferd \
    && /opt/inferd/bin/python -m pip install --no-cache-dir --constraint /build/constraints.txt --index-url "${TORCH_INDEX}" torch \
    && /opt/inferd/bin/python -m pip install --no-cache-dir --constraint /build/constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]" \
    && /opt/inferd/bin/python -m pip uninstall --yes pip

FROM python:${PYTHON}-slim-bookworm
# OpenMP is what the kernels and scikit-learn share.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 inferd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/inferd --shell /usr/sbin/nologin inferd \
    && install --directory --owner=10001 --group=10001 --mode=0750 /var/lib/inferd
COPY --from=packages /opt/inferd /opt/inferd
ENV PATH=/opt/inferd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/var/lib/inferd \
    INFERD_STATE__DATA_DIR=/var/lib/inferd/state \
    HF_HOME=/var/lib/inferd/hub
USER 10001:10001
WORKDIR /var/lib/inferd
EXPOSE 8000 8001
# One process gets the signals: SIGTERM drains.
STOPSIGNAL SIGTERM
ENTRYPOINT ["inferd"]
CMD ["serve", "/etc/inferd/inferd.yaml"]
