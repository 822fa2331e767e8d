# A child image, as a platform team writes it: FROM slipway, a Debian package, a Python package, a recipe of its own.
# docs/base-image.md says what a child can rely on; CI builds this one and tests that (`make image-test`).
ARG SLIPWAY=slipway
# hadolint ignore=DL3006
FROM ${SLIPWAY}

# Installing takes root; the last line gives it up again.
# hadolint ignore=DL3002
USER 0

# A Debian package, by its release's own version.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && git --version

# A Python package: PIP_CONSTRAINT holds every pin of the image while this resolves. Pin your own packages in a file of
# yours; this example takes the newest. The secret is a proxy's CA, if there is one.
# hadolint ignore=DL3013
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    pip install --no-cache-dir --quiet orjson \
    && python -c "import orjson, torch"

# RECIPE=mine, with its arguments checked as every other recipe's are.
COPY recipes/llama/lora.yaml /slipway/recipes/llama/mine.yaml

USER 1000:0
