# `efcil serve` on the CPU, as a user without rights. No image was built from this file yet; a test runs its install steps.
#
#   docker build -f docker/serve.Dockerfile -t efcil-serve .
#   docker run -p 127.0.0.1:8000:8000 -v models:/models -e EFCIL_TOKEN=... efcil-serve
FROM python:3.13-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/efcil
COPY . .
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple} -c constraints.txt torch
RUN pip install -c constraints.txt '.[serve]'
RUN useradd --create-home --uid 10001 efcil && mkdir /models && chown efcil /models
USER efcil
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
CMD ["efcil", "serve", "/models/model", "--host", "0.0.0.0", "--port", "8000"]
