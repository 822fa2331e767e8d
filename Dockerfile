# Slipway: CUDA 12.4 toolkit, PyTorch 2.8, DeepSpeed with its ops compiled, recipes. Built by `make image`.
# No heredocs and no `# syntax=` line, so that the frontend inside any Docker from 20.10 on can build it.

# The public base by digest: the same bytes for everyone. `make image BASE=standin` puts a debootstrapped one here.
ARG BASE=debian:trixie-slim@sha256:d7e12182ce18b85b93007c1dedf31f2d29e01ccf3182cc4017c709b6259bc132

# ---- base: what every other stage, and the finished image, takes from Debian
FROM ${BASE} AS base
WORKDIR /slipway
# For the build only: no question from debconf.
ARG DEBIAN_FRONTEND=noninteractive
# python3-dev and g++-13: Triton, torch extensions and nvcc compile with them (nvcc 12.4 takes no later g++).
# libaio: DeepSpeed's NVMe offload. ibverbs-providers, librdmacm1: NCCL and cuFile over InfiniBand. tini: signals and zombies.
# The compiler gets the names that Python's own build settings, nvcc and people use.
# Packages are not pinned here: the release is, by the base, and security updates have to come in.
# hadolint ignore=DL3008
RUN --mount=type=cache,id=apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=cache,id=apt-archives,target=/var/cache/apt,sharing=locked \
    apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends ca-certificates curl g++-13 htop ibverbs-providers \
       libaio-dev librdmacm1t64 make nvtop procps python3-dev python3-venv tini \
    && update-alternatives --install /usr/bin/gcc gcc /usr/bin/gcc-13 13 \
       --slave /usr/bin/g++ g++ /usr/bin/g++-13 --slave /usr/bin/cc cc /usr/bin/gcc-13 \
       --slave /usr/bin/c++ c++ /usr/bin/g++-13 \
       --slave /usr/bin/x86_64-linux-gnu-gcc x86_64-linux-gnu-gcc /usr/bin/gcc-13 \
       --slave /usr/bin/x86_64-linux-gnu-g++ x86_64-linux-gnu-g++ /usr/bin/g++-13 \
    && c++ --version && python3 --version && tini --version

# ---- toolkit: nvcc, headers, cudart; 0.2 GB of the 7 GB that Debian's package brings
FROM base AS toolkit
COPY docker/build_toolkit.py docker/
# The script loads Debian's packages into a cache mount, keeps what compiling needs, and ends by compiling a program.
RUN --mount=type=cache,id=apt-lists,target=/var/lib/apt/lists,sharing=locked \
    --mount=type=cache,id=cuda-packages,target=/packages,sharing=locked \
    python3 docker/build_toolkit.py /packages /toolkit

# ---- venv: Python with everything in docker/requirements.lock; the largest layer, made once per lock
FROM base AS venv
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
    CUDA_HOME=/usr/local/cuda \
    TORCH_CUDA_ARCH_LIST="8.0 8.6 8.9 9.0+PTX" \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt \
    CURL_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt
COPY scripts/fill_venv.py scripts/pip_settings.py scripts/venv_state.py scripts/
COPY docker/build_venv.py docker/dist_record.py docker/requirements.exclude docker/requirements.lock docker/
# Hashes are checked, packages agree, torch loads. The CA of a proxy, if there is one, lies over the system's bundle
# while this runs and is in no layer.
RUN --mount=type=cache,id=uv,target=/uv \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    UV_CACHE_DIR=/uv PYTHONPATH=scripts python3 docker/build_venv.py /opt/venv

# ---- both: each of the two is made while the other is
FROM venv AS both
COPY --from=toolkit /toolkit/ /
COPY docker/link_wheels.py docker/
# The script ends by asking the linker for what it linked.
RUN python docker/link_wheels.py /opt/venv/lib/python3.13/site-packages

# ---- ops: DeepSpeed's, for CUDA and for machines without a GPU
FROM both AS ops
COPY docker/build_ops.py docker/dist_record.py docker/
# The script stops if an op that is promised is not made. DS_ACCELERATOR: there is no GPU to be found here.
RUN DS_ACCELERATOR=cpu python docker/build_ops.py /ops

# ---- flash-attn: the release's wheel, one compiled here, or none
FROM both AS flash-attn
ARG FLASH_ATTN=wheel
# Bounds for FLASH_ATTN=source: processes at a time (8 GB of memory each), and cards.
ARG MAX_JOBS=2
ARG FLASH_ATTN_CUDA_ARCHS=80;90
COPY docker/build_flash_attn.py docker/flash_attn.json docker/
# The script checks the wheel's sha256; where the release is not reached it names the other two choices.
RUN --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    MAX_JOBS="${MAX_JOBS}" FLASH_ATTN_CUDA_ARCHS="${FLASH_ATTN_CUDA_ARCHS}" \
    python docker/build_flash_attn.py "${FLASH_ATTN}" /wheels

# ---- slipway: the finished image
FROM both AS slipway
COPY --from=ops /ops/ /opt/venv/lib/python3.13/site-packages/
COPY --from=flash-attn /wheels/flash-attn.txt /usr/share/slipway/
COPY docker/prove_ops.py docker/install_wheels.py docker/
# flash-attn's wheel, where there is one, must load; each op loads under both accelerators, and one Adam step is right.
RUN --mount=type=bind,from=flash-attn,source=/wheels,target=/wheels \
    python docker/install_wheels.py /wheels && python docker/prove_ops.py
# A user that is not root, with folders that any other user can write too: the image runs as any UID.
RUN useradd --uid 1000 --gid 0 --no-create-home --home-dir /var/lib/slipway slipway \
    && install -d -m 1777 /var/lib/slipway /cache /slipway/outputs \
    && su slipway -s /bin/sh -c 'touch /cache/x /var/lib/slipway/x /slipway/outputs/x' \
    && rm /cache/x /var/lib/slipway/x /slipway/outputs/x
# USER and LOGNAME: torch asks for a name, and a UID without a passwd entry has none.
# NVIDIA_REQUIRE_CUDA: driver 550 and later, or data-centre branches 525 and 535, which CUDA 12 supports throughout.
# XFORMERS_...: xformers refuses any flash-attn newer than it knows; the one here has the same interface and kernels.
ENV HOME=/var/lib/slipway \
    USER=slipway \
    LOGNAME=slipway \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TORCH_EXTENSIONS_DIR=/cache/torch_extensions \
    SLIPWAY_PYTHON=/opt/venv/bin/python \
    PIP_CONSTRAINT=/slipway/docker/constraints.txt \
    UV_CONSTRAINT=/slipway/docker/constraints.txt \
    XFORMERS_IGNORE_FLASH_VERSION_CHECK=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA="cuda>=12.4 brand=tesla,driver>=525,driver<526 brand=nvidia,driver>=525,driver<526 brand=nvidiartx,driver>=525,driver<526 brand=unknown,driver>=525,driver<526 brand=tesla,driver>=535,driver<536 brand=nvidia,driver>=535,driver<536 brand=nvidiartx,driver>=535,driver<536 brand=unknown,driver>=535,driver<536"
# What changes most comes last: a recipe that was touched costs seconds.
COPY . .
# The project itself (before there are constraints), the pins as constraints for child images, and a list of all that is in here.
RUN env -u UV_CONSTRAINT uv pip install --quiet --no-cache --offline --no-deps --no-build-isolation --python /opt/venv/bin/python --editable . \
    && python docker/finish.py
USER 1000:0
# TensorBoard: tensorboard --bind_all --logdir outputs
EXPOSE 6006
# -g: a Ctrl-C that Docker sends reaches make and the launcher alike, as one at a terminal does.
ENTRYPOINT ["tini", "-g", "--", "/usr/bin/python3", "-I", "/slipway/docker/entry.py"]
CMD ["make", "help"]
