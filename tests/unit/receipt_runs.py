"""Run directories as the stages leave them, and their image, policy and catalogue. Imports none of our code.

Everything is made up; the digests of the identity are right, because they are checked.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "qualify/policy.toml"
STAGES = ("identity", "checkpoint", "load", "numerics", "requests", "performance", "cleanup")
REPOSITORY, REVISION, EPOCH = "IFM/K2-Horizon-Fixture", "feed" * 10, "2026-09-13"
FILES = [
    {"name": "config.json", "size": 10, "sha256": "c0" * 32},
    {"name": "model.safetensors", "size": 4096, "sha256": "de" * 32},
]
NUMBERS: dict[str, dict[str, Any]] = {
    "identity": {},
    "checkpoint": {"format": "fp8-block", "tensors": 100, "bytes": 4096},
    "load": {"missing": 0, "invalid": 0, "classes": {"routed_expert": {"float8_e4m3fn": {"parameters": 4}}}},
    "numerics": {
        "mean_abs_logprob_error": 0.02,
        "p95_abs_logprob_error": 0.06,
        "top5_overlap": 0.98,
        "tie_aware_agreement": 0.995,
        "non_tie_mismatch": 0.002,
        "positions": 512,
        "expert_tokens": 21,
        "decode": {"mean_abs_logprob_error": 0.02, "p95_abs_logprob_error": 0.06, "tie_aware_agreement": 0.99},
        "modules": {
            "embedding": {"max": 0},
            "add": {"max": 0.001},
            **{kind: {"mean": 0.002} for kind in ("norm", "second_norm", "final", "attention")},
            "ffn": {"mean": 0.004, "worst_expert": 0.005},
            "router": {"unequal_logits": 0.001, "misrouted": 0, "mixing": 1e-6},
            "values": {"worst_expert": 0.003, "unequal_logits": 0.001, "misrouted": 0, "mixing": 1e-6},
        },
        "layers": {"ffn.worst_expert": [None, 0.004, 0.005]},
        "reference_device": "cuda",
    },
    "requests": {
        "input_tokens": 512,
        "output_tokens": 512,
        "errors": 0,
        "crossed_answers": 0,
        "canary_mean_logprob_difference": 0.01,
        "canary_largest_tie": 0.0,
        "requests_left": 0,
        "malformed_accepted": 0,
    },
    "performance": {
        f"decode-{count}": {"input_tokens": 512, "output_tokens": 512, "seconds": [1.5, 1.25]} for count in (1, 32, 64)
    },
    "cleanup": {"processes_left": 0, "gpu_bytes_over": 0, "files_changed": 0, "mount": "read-only"},
}
NUMBERS["cleanup"]["manifest_sha256"] = hashlib.sha256(
    json.dumps(FILES, sort_keys=True, separators=(",", ":")).encode()
).hexdigest()
H200 = {"name": "NVIDIA H200", "capability": [9, 0], "count": 1, "driver": "580.159.04", "cuda": "13.0"}


def sha256(value: bytes | str) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()


def text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def identity(artifact: str = "mova-fp8") -> dict[str, Any]:
    """As images/stage.py and images/install.py write it."""
    inputs = {
        "artifact": artifact,
        "engine": {"name": "sglang", "version": "0.5.23", "wheel_sha256": sha256("wheel")},
        "base": {"rootfs_sha256": sha256("rootfs"), "lock_sha256": sha256("lock"), "drift": []},
        "series_sha256": sha256("series"),
        "source_date_epoch": 1796000000,
        "wheels": {"nvidia_cublas-13.1.1.3-py3-none-any.whl": sha256("cublas")},
    }
    return {**inputs, "source_sha256": sha256(text(inputs)), "manifests": {"artifact": sha256("manifest")}}


def inspect(artifact: str = "mova-fp8", **changes: Any) -> list[dict[str, Any]]:
    """`docker image inspect` of the image with that identity; other fields of it do not matter."""
    made = identity(artifact)
    labels = {
        "io.horizon-images.artifact": artifact,
        "org.opencontainers.image.revision": made["source_sha256"],
        "org.opencontainers.image.version": f"0.5.23-{made['source_sha256'][:12]}",
        "io.horizon-images.series": f"sha256:{made['series_sha256']}",
        "io.horizon-images.engine.wheel": f"sha256:{made['engine']['wheel_sha256']}",
        "org.opencontainers.image.base.digest": f"sha256:{made['base']['rootfs_sha256']}",
    }
    image = {
        "Id": f"sha256:{sha256('config')}",
        "RepoDigests": [],
        "Config": {"Labels": labels},
        "RootFS": {"Type": "layers", "Layers": [f"sha256:{sha256('layer 1')}", f"sha256:{sha256('layer 2')}"]},
    }
    return [{**image, **changes}]


def measured_policy(folder: Path) -> Path:
    """The project's policy as it would be had somebody measured the bounds that are missing."""
    measured = re.sub(r'unmeasured = "[^"]*"', 'min = 0.0\nsource = "a test"', POLICY.read_text())
    path = folder / "policy.toml"
    path.write_text(measured)
    assert "unmeasured =" not in measured.split("schema =")[1]
    assert tomllib.loads(measured)
    return path


def facts(policy: Path = POLICY, **changes: Any) -> dict[str, Any]:
    """run.json of a published checkpoint on one H200."""
    made = identity(changes.get("artifact", "mova-fp8"))
    result = {
        "schema": "horizon-images/run/v1",
        "artifact": "mova-fp8",
        "target": "sm90",
        "target_name": "h200",
        "topology": {"tp": 1, "ep": 1, "pp": 1, "dp": 1, "a2a": "none"},
        "image": {"identity": made, "identity_sha256": sha256(text(made)), "substituted_libraries": []},
        "checkpoint": {
            "repository": REPOSITORY,
            "revision": REVISION,
            "source_epoch": EPOCH,
            "scope": "published",
            "format": "fp8-block",
            "identity": {
                "config": FILES[0]["sha256"],
                "index": None,
                "quantization_config": sha256("quantisation"),
                "headers": sha256("headers"),
            },
            "manifest_sha256": sha256(json.dumps(FILES, sort_keys=True, separators=(",", ":"))),
            "bytes": 4096,
            "tensors": 100,
        },
        "declared": {
            "ROUTER_PARTITIONS": {
                "value": 2,
                "said_by": "operator, by environment ROUTER_PARTITIONS",
                "model_override": "xllm_source_router_gemm_partitions",
            }
        },
        "flags": {"--tp-size": 1, "--ep-size": 1, "--enable-metrics": True, "--attention-backend": "fa3"},
        "policy_sha256": sha256(policy.read_bytes()),
    }
    return merge(result, changes)


def stage(name: str, **changes: Any) -> dict[str, Any]:
    """A stage that passed on one H200, without run_sha256."""
    result = {
        "schema": "horizon-images/stage/v1",
        "stage": name,
        "result": "passed",
        "reason": "",
        "tests": {"passed": [f"gpu/test_{name}.py::test_one"], "failed": [], "skipped": []},
        "numbers": copy.deepcopy(NUMBERS[name]),
        "gpu": dict(H200),
        "began": "2026-11-30T21:00:00Z",
        "seconds": 12.5,
    }
    return merge(result, changes)


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Nested replacement; a value that is no dictionary replaces what was there."""
    result = copy.deepcopy(old)
    for key, value in new.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if nested else value
    return result


def write(folder: Path, run: dict[str, Any], stages: dict[str, dict[str, Any] | None] | None = None) -> Path:
    """Write a run directory; ``stages`` changes some stages, None leaves one out."""
    stages = stages or {}
    (folder / "stages").mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(text(run))
    run_sha256 = sha256((folder / "run.json").read_bytes())
    for name in STAGES:
        changes = stages.get(name, {})
        if changes is not None:
            content = stage(name, **{"run_sha256": run_sha256, **changes})
            (folder / "stages" / f"{name}.json").write_text(text(content))
    return folder


SYNTHETIC = {"checkpoint": {"repository": None, "revision": None, "source_epoch": None, "scope": "synthetic"}}

RECIPE = f"""
artifact = "mova-fp8"
image = true
formats = ["fp8-block"]

[targets.sm90]
status = "verified"

[targets.sm120]
status = "not-run"

[[launch.declarations]]
variable = "ROUTER_PARTITIONS"
model_override = "xllm_source_router_gemm_partitions"
values = [1, 2]
reason = "a test"

[[launch.flags]]
flag = "--tp-size"
value = 1
variable = "TP"
reason = "a test"

[[checkpoints]]
name = "fixture"
fixture = true
repository = "{REPOSITORY}"
revision = "{REVISION}"
source_epoch = "{EPOCH}"
reviewed_by = "tests"
headers_sha256 = "{sha256("headers")}"
topologies = [[1, 1], [2, 1]]
""" + "".join(
    f"""
[[checkpoints.files]]
role = "{role}"
name = "{file["name"]}"
bytes = {file["size"]}
sha256 = "{file["sha256"]}"
"""
    for role, file in zip(("config", "weights"), FILES, strict=True)
)
