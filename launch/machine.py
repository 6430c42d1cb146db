"""What the container sees of the machine, and whether the image can run on it: GPUs, driver, shared memory, cache."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun

GIB = 1 << 30
SHM = Path("/dev/shm")
#: NCCL's host buffers of one rank. Docker gives 64 MiB unless told otherwise, and the first collective then fails.
SHM_PER_RANK = 1 * GIB
#: Compiled kernels and CUDA-graph side files of one start.
CACHE_FREE = 2 * GIB
HINTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: check --gpus and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and libcuda differ: restart the container after a driver update",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the driver is older than the compat libraries in use",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; memory in bytes."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int

    @property
    def target(self) -> str:
        """The architecture as recipes name it: sm90, sm120."""
        return f"sm{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True, slots=True)
class Machine:
    """The visible GPUs, the driver's version, and the CUDA version that it supports, e.g. (13, 0)."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: tuple[int, int]

    def as_dict(self) -> dict[str, Any]:
        return {
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "driver": self.driver,
            "cuda": ".".join(map(str, self.cuda)),
        }


def query() -> Machine:
    """Ask the driver, in the order and selection of CUDA_VISIBLE_DEVICES; nothing is allocated on a GPU.

    Raises CannotRun where there is no driver or no GPU.
    """
    try:
        import pynvml
        from cuda.bindings import driver as cuda
    except ImportError as error:
        raise CannotRun(f"{error.name} is not installed: this runs inside the image") from None

    def call(function, *arguments):
        try:
            status, *values = function(*arguments)
        except RuntimeError:  # cuda-bindings finds no libcuda.so.1
            raise CannotRun(
                "no NVIDIA driver in this container: start it with --gpus all (or --device nvidia.com/gpu=all)"
            ) from None
        if status != cuda.CUresult.CUDA_SUCCESS:
            hint = HINTS.get(status.name, "see `nvidia-smi` on the host")
            raise CannotRun(f"the NVIDIA driver says {status.name}: {hint}")
        return values[0] if values else None

    supported = call(cuda.cuDriverGetVersion)
    call(cuda.cuInit, 0)
    attribute = cuda.CUdevice_attribute
    gpus = []
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        for index in range(call(cuda.cuDeviceGetCount)):
            device = call(cuda.cuDeviceGet, index)
            memory = _memory(pynvml, bytes(call(cuda.cuDeviceGetUuid, device).bytes).hex())
            gpus.append(
                Gpu(
                    call(cuda.cuDeviceGetName, 128, device).split(b"\0")[0].decode(),
                    (
                        call(cuda.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
                        call(cuda.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
                    ),
                    call(cuda.cuDeviceTotalMem, device),
                    memory.free,
                )
            )
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise CannotRun(f"the NVIDIA driver does not answer ({error}): see `nvidia-smi` on the host") from None
    return Machine(tuple(gpus), version, (supported // 1000, supported % 1000 // 10))


def _memory(pynvml, uuid: str):
    """NVML's memory of the GPU with these 16 UUID bytes (NVML numbers all GPUs, CUDA only the visible ones)."""
    dashed = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
    for kind in ("GPU", "MIG"):
        try:
            return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{dashed}"))
        except pynvml.NVMLError_NotFound:
            continue
    raise CannotRun(f"GPU {dashed} is known to CUDA and not to NVML: restart the container")


def image_cuda() -> tuple[int, int]:
    """The CUDA version that the image's wheels were built for."""
    major, minor, *_ = importlib.metadata.version("nvidia-cuda-runtime").split(".")
    return int(major), int(minor)


def check(machine: Machine, targets: dict[str, str], tp: int, cuda: tuple[int, int]) -> str:
    """Return the target of the GPUs that TP ranks would use.

    Raises CannotRun where GPUs are too few, of different or unlisted architectures, or the driver is too old.
    """
    if len(machine.gpus) < tp:
        raise CannotRun(
            f"TP={tp} needs {tp} GPUs and {len(machine.gpus)} are visible: lower TP, or give the container more"
        )
    used = machine.gpus[:tp]
    if machine.cuda[0] < cuda[0]:
        raise CannotRun(
            f"the driver {machine.driver} supports CUDA {machine.cuda[0]}.{machine.cuda[1]}, the image needs CUDA "
            f"{cuda[0]}.{cuda[1]}: install a driver of the 580 series or newer on the host"
        )
    found = sorted({gpu.target for gpu in used})
    if len(found) > 1:
        raise CannotRun(
            f"GPUs of different architectures are visible ({', '.join(found)}): select with CUDA_VISIBLE_DEVICES"
        )
    if targets.get(found[0], "unsupported") == "unsupported":
        raise CannotRun(f"{used[0].name} is {found[0]}; the artifact lists {', '.join(targets)}")
    return found[0]


def check_port(host: str, port: int) -> None:
    """Raises CannotRun where the port cannot be listened on: another server there could be taken for ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CannotRun(f"cannot listen on {host} port {port}: {error.strerror}; set PORT or HOST") from None


def check_shared_memory(tp: int, shm: Path = SHM) -> None:
    """Raises CannotRun where /dev/shm cannot hold the ranks' collective buffers."""
    status = os.statvfs(shm)
    size, needed = status.f_blocks * status.f_frsize, SHM_PER_RANK * tp
    if tp > 1 and size < needed:
        raise CannotRun(
            f"{shm} has {size / GIB:.2f} GiB, TP={tp} needs {needed // GIB}: start the container with --shm-size 16g"
        )


def check_cache(folder: Path, model: Path) -> None:
    """Raises CannotRun where compiled kernels cannot be kept: not writable, inside the checkpoint, or full."""
    resolved, checkpoint = folder.resolve(), model.resolve()
    if checkpoint in (resolved, *resolved.parents):
        raise CannotRun(f"the cache {folder} lies inside the checkpoint: mount another volume there")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CannotRun(
            f"the cache {folder} is not writable for uid {os.getuid()}, gid {os.getgid()}: mount a volume that is "
            "(-v horizon-cache:/var/cache/horizon, or chgrp 0 and chmod g+rwx)"
        )
    free = shutil.disk_usage(folder).free
    if free < CACHE_FREE:
        raise CannotRun(
            f"the cache {folder} has {free / GIB:.1f} GiB free, and compiled kernels need {CACHE_FREE // GIB}"
        )
