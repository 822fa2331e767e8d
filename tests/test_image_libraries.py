"""What is compiled in the image: every library resolves, no CUDA library is there twice, ops load, nvcc compiles."""

import collections
import json
import re

import pytest
from containers import AS_ROOT, ONLINE, ROOT, STRICT, python, shell

pytestmark = pytest.mark.image
PACKAGES = "/opt/venv/lib/python3.13/site-packages"
FILES = f"find {PACKAGES} -type f '(' -name '*.so' -o -name '*.so.[0-9]*' ')'"
# nvcc reads CUDA and torch's headers for CUDA code; g++ reads torch's largest header; the two are linked.
KERNEL = """
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
__global__ void twice(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2; }
void launch(float *x, int n) {
  twice<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x, n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
"""
BINDING = """
#include <torch/extension.h>
void launch(float *x, int n);
torch::Tensor run(torch::Tensor x) {
  if (x.is_cuda()) launch(x.data_ptr<float>(), x.numel());
  return x;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }
"""


def seen(command: str, pattern: str) -> collections.Counter:
    """How often each match of `pattern` is in what `command` prints of all libraries; an error of it is a failure."""
    line = f"{FILES} -print0 | xargs -0 -n 40 {command} | grep -oE '{pattern}' | sort | uniq -c"
    rows = (row.split(maxsplit=1) for row in shell(line, flags=AS_ROOT).splitlines())
    return collections.Counter({what: int(count) for count, what in rows})


def test_every_library_resolves_but_for_the_drivers():
    found = seen("ldd", r"\S+ => not found|libc\.so\.6 => /|^/\S+:$")
    missing = {row.split()[0] for row in found if row.endswith("not found")}
    assert missing <= {"libcuda.so.1"}, missing
    # Of a last lot of one file ldd does not print the name.
    assert sum(row.startswith("/") for row in found) >= count() - 1 > 200
    assert found["libc.so.6 => /"] > 200, "ldd resolved nothing"


def count() -> int:
    return int(shell(f"{FILES} | wc -l", flags=AS_ROOT))


def test_no_library_needs_a_newer_glibc_than_the_images():
    found = seen("objdump -T", "GLIBC_[0-9.]*[0-9]|file format elf64-x86-64")
    needed = {tuple(map(int, name[6:].split("."))) for name in found if name.startswith("GLIBC_")}
    have = tuple(map(int, re.search(r"([\d.]+)\n", shell("ldd --version"))[1].split(".")))
    assert len(needed) > 5 and max(needed) <= have
    assert found["file format elf64-x86-64"] == count()


@pytest.mark.parametrize("name", ["libcublas.so", "libcublasLt.so", "libcudnn.so", "libnccl.so", "libcusparse.so"])
def test_a_cuda_library_is_there_once(name):
    found = shell(f"find / -xdev -type f -name '{name}*'", flags=AS_ROOT).split()
    assert len(found) == 1, found


def test_the_toolkits_folder_links_to_the_wheels_libraries():
    for name in ("libcublas.so", "libcurand.so", "libcusparse.so", "libnvrtc.so", "libcudnn.so"):
        assert shell(f"readlink -f /usr/local/cuda/lib64/{name}").startswith(PACKAGES)
    assert shell("find /usr/local/cuda/ -xtype l") == ""


def test_packages_agree_with_each_other():
    assert "All installed packages are compatible" in shell("uv pip check --python /opt/venv/bin/python 2>&1")
    assert shell("pip check").strip() == "No broken requirements found."


def test_every_promised_op_loads_and_steps_without_a_compiler():
    table = shell("cd / && PATH=/opt/venv/bin python /slipway/docker/prove_ops.py", timeout=280)
    rows = [row.split() for row in table.splitlines()]
    rows = [row for row in rows if len(row) == 3 and row[1] in ("cpu", "cuda")]  # the rest are DeepSpeed's own words
    promised = {(op, where) for op in ("fused_adam", "cpu_adam", "async_io", "pin_memory") for where in ("cpu", "cuda")}
    assert {(op, where) for op, where, _ in rows} == promised | {("deepspeed_shm_comm", "cpu")}
    assert all(file.startswith(PACKAGES) for _, _, file in rows)


# DeepSpeed enters these two only where the processor has AVX-512: vector_kernel_level in its shm_interface.cpp.
GUARDED = {"reduce_bf16_buffers", "reduce_fp16_buffers"}


def test_cpu_ops_run_on_any_x86_64_v3_machine():
    """No AVX-512 register but in functions that are guarded; that AVX2 is seen shows that the disassembly was read."""
    files = shell(f"find {PACKAGES}/deepspeed -name '*.so' ! -path '*on_cuda*'").split()
    assert len(files) == 5, files
    used = {"ymm": set(), "zmm": set()}
    for file in files:
        function = ""
        for line in shell(f"objdump -dC --no-show-raw-insn {file}").splitlines():
            if line.endswith(">:"):
                function = line.partition("<")[2].partition("(")[0]
            for register in re.findall(r"%([yz]mm)", line):
                used[register].add(function)
    assert used["zmm"] <= GUARDED, used["zmm"] - GUARDED
    assert len(used["ymm"]) > 10


def test_fused_adam_has_machine_code_for_each_card():
    line = f"cuobjdump --list-elf {PACKAGES}/deepspeed/ops/adam/on_cuda/fused_adam_op*.so"
    assert set(re.findall(r"sm_(\d+)", shell(line))) == {"80", "86", "89", "90"}


def test_deepspeed_xformers_and_the_rest_import():
    python("import deepspeed, xformers.ops, bitsandbytes, liger_kernel, trl, peft, accelerate, datasets")


def test_deepspeed_imports_as_on_a_machine_with_a_gpu():
    """With a GPU, DeepSpeed runs nvcc when it is imported, and accelerate imports it: every flavour needs nvcc."""
    code = "import torch; torch.cuda.is_available = lambda: True; import deepspeed; print(deepspeed.__name__)"
    flags = (*STRICT, "--env", "DS_ACCELERATOR=cuda")
    assert python(code, flags=flags).splitlines()[-1] == "deepspeed"


@pytest.mark.timeout(600)
def test_nvcc_is_12_4_and_compiles_an_extension_against_torch():
    code = f"""
import torch, pathlib
from torch.utils.cpp_extension import load
pathlib.Path("/tmp/kernel.cu").write_text({KERNEL!r}); pathlib.Path("/tmp/binding.cpp").write_text({BINDING!r})
sources = ["/tmp/kernel.cu", "/tmp/binding.cpp"]
module = load("twice", sources, build_directory="/tmp", verbose=True, with_cuda=True, extra_cflags=["-O0"])
print(module.run(torch.ones(3)).tolist())
"""
    flags = (*STRICT, "--env", "TORCH_CUDA_ARCH_LIST=8.0", "--env", f"CODE={code}")
    line = 'nvcc --version && python -W ignore -c "$CODE" && cuobjdump --list-elf /tmp/twice.so'
    said = shell(line, flags=flags, timeout=580)
    assert "release 12.4," in said and "[1.0, 1.0, 1.0]" in said and "sm_80" in said, said


# One of the 72 files, for one kind of card, without the variants that these switches of flash-attn's own leave out.
FLASH_ATTN = """
cd /tmp; echo "$PIN" > pin.txt; export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE
pip download --quiet --no-deps --no-build-isolation --no-binary :all: --require-hashes --requirement pin.txt
tar -xzf flash_attn-*.tar.gz; cd flash_attn-*/csrc
folders="-I flash_attn -I flash_attn/src -I cutlass/include -I $TORCH -I $TORCH/torch/csrc/api/include"
switches=$(printf -- '-DFLASHATTENTION_DISABLE_%s ' DROPOUT ALIBI UNEVEN_K SOFTCAP LOCAL)
nvcc -c -std=c++17 -O1 -arch=sm_80 --expt-relaxed-constexpr --expt-extended-lambda $switches $folders \
  $(python3-config --includes) -o /tmp/one.o flash_attn/src/flash_fwd_hdim32_fp16_causal_sm80.cu
cuobjdump --list-elf /tmp/one.o
"""


@pytest.mark.timeout(900)
def test_a_source_file_of_flash_attn_compiles_to_an_object():
    pin = json.loads((ROOT / "docker/flash_attn.json").read_text())
    requirement = f"flash-attn=={pin['version']} --hash=sha256:{pin['source_sha256']}"
    flags = (*ONLINE, "--env", f"PIN={requirement}", "--env", f"TORCH={PACKAGES}/torch/include")
    assert "sm_80.cubin" in shell(FLASH_ATTN, flags=flags, timeout=800)


def test_triton_finds_a_c_compiler_and_python_h():
    program = "#include <Python.h>\\nint main() { return 0; }"
    shell(f"printf '{program}' > /tmp/a.c && gcc $(python3.13-config --includes) -c /tmp/a.c -o /tmp/a.o")


def test_folders_stay_within_their_budget():
    """Measured with du in the image; docker/budget.json holds the bounds in MB, with their sum at most 9.0 GB."""
    budget = json.loads((ROOT / "docker/budget.json").read_text())
    assert sum(budget.values()) <= 9000
    sizes = {}
    for folder in budget:
        sizes[folder] = int(shell(f"du -sxm {folder} | cut -f1", flags=AS_ROOT))
    whole = int(shell("du -sxm / | cut -f1", flags=AS_ROOT))  # -x leaves out /proc, /sys and mounts
    assert {folder: size for folder, size in sizes.items() if size > budget[folder]} == {}
    assert whole * 1.048576 <= 9000, whole
