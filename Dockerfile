# The server's image. docker build --target cpu|cuda; `make image-check` runs these very steps
# without Docker, in a root made by debootstrap.
#
# torch is pinned by version. Which build of it is taken is a matter of the index: PyPI's is the
# CUDA one; for `cpu` name an index of CPU builds in TORCH_INDEX, a tenth of the size.

FROM debian:12.12-slim AS python
# bash and wget: KubeRay starts Ray with the one and probes it with the other
RUN apt-get update && apt-get install -y --no-install-recommends \
        bash ca-certificates python3 python3-venv wget \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
# compiles the CPU kernels; CXX is part of their name, so it is the same in the stages below
ENV CXX=g++
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/specdec
COPY pyproject.toml constraints.txt /opt/specdec/src/
ARG TORCH_INDEX=""
# what is depended on, in a layer that the source's changes leave alone
RUN python3 -m venv /opt/specdec/venv \
    && /opt/specdec/venv/bin/python -c "import tomllib; project = tomllib.load(open('src/pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *project['optional-dependencies']['serve'], sep='\n')" > /tmp/requirements.txt \
    && /opt/specdec/venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -c src/constraints.txt -r /tmp/requirements.txt
COPY README.md serve_config.yaml /opt/specdec/src/
COPY prefix_cache /opt/specdec/src/prefix_cache
COPY specdec /opt/specdec/src/specdec
COPY deployments /opt/specdec/src/deployments
COPY k8s /opt/specdec/src/k8s
# serve_config.yaml as a cluster has it: any address, and the cache of this image
RUN /opt/specdec/venv/bin/pip install --no-cache-dir --no-deps ./src \
    && cd src && ../venv/bin/python -m k8s.tools.serve_config --print base > ../serve_config.yaml
# The default model with its draft heads (they are part of the package) and the compiled kernels,
# without which a step takes twice as long and which nothing in the last stage could compile: on a
# machine that should have made them, the last line fails. Empty leaves the model out, to be
# mounted at /models.
ARG BAKE_MODEL=smollm2-135m-instruct
RUN mkdir -p cache \
    && if [ -n "$BAKE_MODEL" ]; then venv/bin/specdec models --cache-dir cache --fetch "$BAKE_MODEL"; fi \
    && rm -rf cache/downloads src \
    && venv/bin/python -c "from pathlib import Path; from specdec.model.native.build import load_kernels; load_kernels(Path('cache'))" \
    && if grep -q avx2 /proc/cpuinfo; then ls cache/native/*.so; fi

FROM python AS cpu
# a login shell, which KubeRay uses, forgets PATH unless told here
RUN groupadd --gid 10001 specdec \
    && useradd --uid 10001 --gid 10001 --create-home specdec \
    && echo 'export PATH=/opt/specdec/venv/bin:$PATH' > /etc/profile.d/specdec.sh
COPY --from=build /opt/specdec /opt/specdec
ENV PATH=/opt/specdec/venv/bin:/usr/local/bin:/usr/bin:/bin \
    CXX=g++ \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/specdec
USER 10001:10001
EXPOSE 8000
CMD ["python", "-m", "deployments", "/opt/specdec/serve_config.yaml"]

FROM cpu AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
