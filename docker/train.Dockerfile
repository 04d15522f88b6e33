# Experiments on NVIDIA GPUs; the driver and the container toolkit are the host's. No image was built from this file yet; a test runs its
# install steps.
#
#   docker build -f docker/train.Dockerfile -t efcil .
#   docker run --gpus all --ipc host -v "$PWD":/work efcil run dpcr cifar100 --data data --tasks 10
FROM python:3.13-slim
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/efcil
COPY . .
RUN pip install -c constraints.txt torch
RUN pip install -c constraints.txt '.[tensorboard]'
RUN useradd --create-home --uid 10001 efcil && mkdir /work && chown efcil /work
USER efcil
WORKDIR /work
ENTRYPOINT ["efcil"]
CMD ["--help"]
