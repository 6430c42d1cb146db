"""Stage "compiler": kernels that are compiled while serving can be compiled. Needs no GPU; nothing is run."""

import importlib.util
import re
import subprocess
from pathlib import Path


def test_compiler_and_headers_are_of_one_release():
    """CCCL refuses other pairs, and a newer compiler makes PTX that the driver of torch's CUDA may not take."""
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    header = Path("/opt/horizon/cuda/include/cuda_runtime_api.h").read_text()
    defined = int(re.search(r"#define CUDART_VERSION\s+(\d+)", header)[1])
    assert re.search(r"release (\d+\.\d+)", version)[1] == f"{defined // 1000}.{defined % 1000 // 10}"


def test_deep_gemm_compiles(tmp_path):
    """The headers of the block-FP8 kernels that DeepEP's experts run on sm90, which DeepGEMM compiles at first use."""
    include = Path(importlib.util.find_spec("deep_gemm").submodule_search_locations[0], "include")
    source = tmp_path / "kernel.cu"
    source.write_text("#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>\n")
    command = ["nvcc", "-std=c++20", "-arch=sm_90a", "--expt-relaxed-constexpr", f"-I{include}", "-cubin", source]
    done = subprocess.run([*command, "-o", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
