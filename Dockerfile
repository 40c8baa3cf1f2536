# CPU:  docker build -t afserve .
# CUDA: docker build -t afserve:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=gpu,tls .
# Two stages, so that the compiler stays behind; with the extra gpu a small one is there, which Triton makes its launcher with. torch's wheels bring their own CUDA libraries; the host brings the driver.

FROM python:3.12-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=tls
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/afserve
ENV PATH=/opt/afserve/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt .
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY . .
RUN pip install --constraint constraints.txt ".[$EXTRAS]"

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title=afserve org.opencontainers.image.licenses=Apache-2.0
ARG EXTRAS=tls
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 $(case ",$EXTRAS," in *,gpu,*) echo gcc libc6-dev;; esac) \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 afserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin afserve \
    && install -d -o afserve -g afserve -m 700 /var/lib/afserve
COPY --from=build /opt/afserve /opt/afserve
ENV PATH=/opt/afserve/bin:$PATH HOME=/tmp TRITON_CACHE_DIR=/var/lib/afserve/triton PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
VOLUME /var/lib/afserve
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["python", "-m", "afserve.launch.sites.container"]
