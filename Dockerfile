# An image that trains, on two processes of one machine by default:
#   docker build -t ddp_callbacks .                       # torch as PyPI has it: with CUDA
#   docker build --build-arg TORCH_INDEX=... -t ddp_callbacks .   # the CPU build: the address on torch's own page
#   docker run --rm --shm-size 1g ddp_callbacks
# examples/two_machines has two containers that train together.
FROM python:3.13-slim

ARG TORCH_INDEX=
COPY pyproject.toml README.md LICENSE /src/
COPY ddp_callbacks /src/ddp_callbacks
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "/src[lightning,torchbearer,examples]"
COPY examples /examples
WORKDIR /examples
CMD ["ddprun", "--nproc-per-node", "2", "digits_lightning/train.py"]
