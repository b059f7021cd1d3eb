# A hospital's party, or the coordinator's, in a container: FedAtlas with NVIDIA FLARE, for CPUs.
#
#   docker build -t fedatlas .
#   docker run --rm --user "$(id -u):$(id -g)" --read-only --tmpfs /tmp --shm-size 2g \
#     -v /secure/hospital-a:/kit -v /data/ct:/data:ro fedatlas /kit --data /data
#
# See docs/how-to/deploy.md. For a GPU give an index of torch that has CUDA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=nvflare,secure,privacy,dicom
COPY constraints.txt /constraints.txt
COPY --from=build /wheels /wheels
# The same versions everywhere: a party with others is refused when it joins. The wheel without a version is the one built above.
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' /constraints.txt)" \
 && pip install --no-cache-dir --index-url "$TORCH_INDEX" "$torch" \
 && wheel="$(echo /wheels/fedatlas-*.whl)" \
 && pip install --no-cache-dir --constraint /constraints.txt "${wheel}[${EXTRAS}]" \
 && rm -r /wheels
# nothing is written outside of the kit and /tmp, whoever runs it
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --no-create-home party
USER 10001
STOPSIGNAL SIGINT
ENTRYPOINT ["fedatlas", "deploy", "start"]
CMD ["/kit", "--data", "/data"]
