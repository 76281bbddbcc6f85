# The gateway alone, for a pod whose engine is vLLM's own image. No torch, nothing of the engine.
#   docker build -t tidegate:0.1.0 .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
ENV UV_COMPILE_BYTECODE=1
COPY requirements/uv.txt requirements/gateway.txt requirements/
RUN python -m venv /opt/uv \
 && /opt/uv/bin/python -m pip install --quiet --no-cache-dir --no-deps --require-hashes -r requirements/uv.txt \
 && python -m venv --without-pip /opt/tidegate \
 && /opt/uv/bin/uv pip install --python /opt/tidegate/bin/python --require-hashes --no-deps -r requirements/gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY launcher launcher
RUN /opt/uv/bin/uv pip install --python /opt/tidegate/bin/python --no-deps .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/tidegate /opt/tidegate
WORKDIR /opt/tidegate
ENV TIDEGATE_HOST=0.0.0.0
USER 65532:65532
EXPOSE 8000
# The process answers; whether it would take requests is /readyz.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["/opt/tidegate/bin/python", "-c", "import os, urllib.request; port = os.environ.get('TIDEGATE_OPS_PORT') or os.environ.get('TIDEGATE_PORT') or 8000; urllib.request.urlopen(f'http://127.0.0.1:{port}/livez', timeout=4)"]
ENTRYPOINT ["/opt/tidegate/bin/python", "-m", "app"]
