"""The machine's checks and the memory arithmetic, on made-up machines; the driver's API is a stand-in."""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from pathlib import Path

import pytest

from launch import machine, memory
from launch.machine import GIB, Gpu, Machine
from qualify.errors import CannotRun, Rejected

ROOT = Path(__file__).resolve().parents[2]
CONFIG = json.loads((ROOT / "tests/data/K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_text())
TARGETS = {"sm90": "not-run", "sm120": "unsupported"}
H200 = Gpu("NVIDIA H200", (9, 0), int(139.8 * GIB), int(139.3 * GIB))
WEIGHTS = 48_353_998_800


def gpus(*found: Gpu, cuda=(13, 0)) -> Machine:
    return Machine(found, "580.159.04", cuda)


def refusal(kind, function, *arguments) -> str:
    with pytest.raises(kind) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_returns_the_target():
    assert machine.check(gpus(H200, H200), TARGETS, 2, (13, 0)) == "sm90"
    assert machine.check(gpus(H200, cuda=(13, 2)), TARGETS, 1, (13, 1)) == "sm90"
    assert machine.check(gpus(H200, cuda=(13, 0)), TARGETS, 1, (13, 1)) == "sm90"  # minor versions are compatible
    other = Gpu("RTX", (12, 0), GIB, GIB)
    assert machine.check(gpus(H200, other), TARGETS, 1, (13, 0)) == "sm90"  # the second is not used


@pytest.mark.parametrize(
    ("found", "tp", "says"),
    [
        (gpus(H200), 2, "TP=2 needs 2 GPUs and 1 are visible"),
        (gpus(), 1, "0 are visible"),
        (gpus(H200, cuda=(12, 8)), 1, "supports CUDA 12.8, the image needs CUDA 13.0"),
        (gpus(H200, Gpu("RTX", (12, 0), 1, 1)), 2, "different architectures"),
        (gpus(Gpu("NVIDIA A100", (8, 0), 1, 1)), 1, "NVIDIA A100 is sm80; the artifact lists sm90"),
        (gpus(Gpu("RTX PRO 6000", (12, 0), 1, 1)), 1, "is sm120"),
    ],
)
def test_wrong_machine(found, tp, says):
    assert says in refusal(CannotRun, machine.check, found, TARGETS, tp, (13, 0))


def test_cache(tmp_path):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir(), cache.mkdir()
    machine.check_cache(cache, model)
    assert "inside the checkpoint" in refusal(CannotRun, machine.check_cache, model, model)
    (model / "cache").mkdir()
    (tmp_path / "link").symlink_to(model / "cache")
    assert "inside the checkpoint" in refusal(CannotRun, machine.check_cache, tmp_path / "link", model)
    assert "not writable" in refusal(CannotRun, machine.check_cache, tmp_path / "none", model)


def test_full_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=GIB))
    assert "1.0 GiB free" in refusal(CannotRun, machine.check_cache, tmp_path, tmp_path / "model")


def test_shared_memory(monkeypatch):
    size = 64 << 20
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_blocks=size // 4096, f_frsize=4096))
    machine.check_shared_memory(1)
    assert "--shm-size" in refusal(CannotRun, machine.check_shared_memory, 2)
    size = 2 * GIB
    machine.check_shared_memory(2)


def test_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}: Address already in use" in refusal(CannotRun, machine.check_port, "127.0.0.1", port)
    machine.check_port("127.0.0.1", port)
    assert "cannot listen on 192.0.2.1" in refusal(CannotRun, machine.check_port, "192.0.2.1", port)


def test_kv_bytes_of_the_published_config():
    # 2 (K, V) x 48 layers x 8 heads x 128 x 2 bytes, by hand
    assert memory.kv_bytes_per_token(CONFIG, 1) == 196_608
    assert memory.kv_bytes_per_token(CONFIG, 2) == 98_304
    assert memory.kv_bytes_per_token(CONFIG, 16) == 2 * 48 * 1 * 128 * 2  # heads are replicated
    assert memory.kv_bytes_per_token(CONFIG, 1, "fp8_e4m3") == 98_304
    assert "--kv-cache-dtype nvfp4" in refusal(Rejected, memory.kv_bytes_per_token, CONFIG, 1, "nvfp4")


def test_fit_on_an_h200():
    found = memory.fit(WEIGHTS, 196_608, 1, H200, 0.85)
    assert 330_000 < found.tokens < 400_000
    memory.check(found, 262_144, H200, 1)
    assert "524,288 tokens does not fit" in refusal(Rejected, memory.check, found, 524_288, H200, 1)
    memory.check(memory.fit(WEIGHTS, 98_304, 2, H200, 0.85), 524_288, H200, 2)


def test_gpu_too_small_or_held():
    small = Gpu("NVIDIA L40", (8, 9), 48 * GIB, int(47.8 * GIB))
    assert "the weights take" in refusal(
        CannotRun, memory.check, memory.fit(WEIGHTS, 196_608, 1, small, 0.85), 1, small, 1
    )
    held = Gpu("NVIDIA H200", (9, 0), H200.total, 60 * GIB)
    assert "another process" in refusal(
        CannotRun, memory.check, memory.fit(WEIGHTS, 196_608, 1, held, 0.85), 1, held, 1
    )


@pytest.fixture
def driver(monkeypatch):
    """The two driver libraries with one H200; fields of the returned namespace change what they say."""
    says = types.SimpleNamespace(init=0, count=1, missing=False, capability=(9, 0))
    result = types.SimpleNamespace
    status = {0: "CUDA_SUCCESS", 100: "CUDA_ERROR_NO_DEVICE", 803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
              804: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", 999: "CUDA_ERROR_UNKNOWN"}  # fmt: skip
    members = {name: result(name=name) for name in status.values()}

    def answer(*values, code=0):
        if says.missing:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return (members[status[code]], *values)

    major, minor = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR", "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"
    cuda = types.ModuleType("cuda.bindings.driver")
    cuda.CUresult = result(**members)
    cuda.CUdevice_attribute = result(**{major: 0, minor: 1})
    cuda.cuDriverGetVersion = lambda: answer(13010)
    cuda.cuInit = lambda flags: answer(code=says.init)
    cuda.cuDeviceGetCount = lambda: answer(says.count)
    cuda.cuDeviceGet = lambda index: answer(index)
    cuda.cuDeviceGetUuid = lambda device: answer(result(bytes=bytes(range(16))))
    cuda.cuDeviceGetName = lambda size, device: answer(b"NVIDIA H200\0\0\0")
    cuda.cuDeviceGetAttribute = lambda which, device: answer(says.capability[which])
    cuda.cuDeviceTotalMem = lambda device: answer(150 * GIB)
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.NVMLError_NotFound = type("NVMLError_NotFound", (nvml.NVMLError,), {})
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f": "handle"}[uuid]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: result(free=149 * GIB)
    package = types.ModuleType("cuda.bindings")
    package.driver = cuda
    for name, module in {"pynvml": nvml, "cuda": types.ModuleType("cuda"), "cuda.bindings": package}.items():
        monkeypatch.setitem(sys.modules, name, module)
    says.nvml = nvml
    return says


def test_query(driver):
    found = machine.query()
    assert found == Machine((Gpu("NVIDIA H200", (9, 0), 150 * GIB, 149 * GIB),), "580.1", (13, 1))
    assert found.gpus[0].target == "sm90"
    driver.capability = (12, 0)
    assert machine.query().gpus[0].target == "sm120"


@pytest.mark.parametrize(
    ("code", "says"), [(100, "no GPU is visible"), (803, "driver update"), (804, "compat"), (999, "nvidia-smi")]
)
def test_query_failures(driver, code, says):
    driver.init = code
    assert says in refusal(CannotRun, machine.query)


def test_query_without_a_driver(driver):
    driver.missing = True
    assert "--gpus all" in refusal(CannotRun, machine.query)


def test_query_outside_the_image(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "inside the image" in refusal(CannotRun, machine.query)


def test_query_where_nvml_fails(driver):
    def broken():
        raise driver.nvml.NVMLError("GPU is lost")

    driver.nvml.nvmlInit = broken
    assert "GPU is lost" in refusal(CannotRun, machine.query)
