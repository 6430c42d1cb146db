"""Stands in for the CUDA driver API as launch.machine uses it: one GPU of name FAKE_GPU_NAME, an H200 without it."""

import enum
import os
from types import SimpleNamespace


class CUresult(enum.Enum):
    CUDA_SUCCESS = 0


class CUdevice_attribute(enum.Enum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 0
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 1


OK = CUresult.CUDA_SUCCESS
NAME = os.environ.get("FAKE_GPU_NAME", "NVIDIA H200")
CAPABILITY = (12, 0) if "RTX" in NAME else (9, 0)


def cuDriverGetVersion():
    return OK, 13000


def cuInit(flags):
    return (OK,)


def cuDeviceGetCount():
    return OK, 1


def cuDeviceGet(index):
    return OK, index


def cuDeviceGetUuid(device):
    return OK, SimpleNamespace(bytes=bytes(16))


def cuDeviceGetName(size, device):
    return OK, NAME.encode() + b"\0"


def cuDeviceGetAttribute(which, device):
    return OK, CAPABILITY[which.value]


def cuDeviceTotalMem(device):
    return OK, 150 << 30
