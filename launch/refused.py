"""What no recipe hands to the engine, and why: flags by pattern, environment variables by name.

A recipe's own ``launch.refused`` adds what only its format forbids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from qualify.errors import Rejected

_STRICT = "the strict loader refuses it: weights must stay where and what they were when they were checked"
_SERVER = "the launcher watches one HTTP server with its scheduler and detokenizer on this machine, and no other kind"
_PLAIN = "the health probe and the check of /server_info speak plain HTTP; put a TLS proxy in front"
_FOREIGN = "it would bring in code or weights that nobody has inspected"
_SIZES = "only tensor and expert parallelism are checked against the checkpoint"
_TRAFFIC = "one port is served, and nothing is sent elsewhere"
_SECRET = "an argument is readable by every process of the host"

#: pattern of the first spelling -> what to know
FLAGS = {
    "--config": "a file of flags would not be seen here; give the flags themselves",
    "--cuda-graph-config": "give its single flags, --cuda-graph-max-bs-decode and the like",
    "--api-key": f"{_SECRET}; set API_KEY_FILE",
    "--admin-api-key": f"{_SECRET}; it is not offered",
    "--watermark-config": f"{_SECRET}; it is not offered",
    "--ssl-*": _PLAIN,
    "--enable-ssl-refresh": _PLAIN,
    "--enable-http2": _PLAIN,
    "--grpc-*": _SERVER,
    "--smg-*": _SERVER,
    "--use-ray": _SERVER,
    "--nnodes": _SERVER,
    "--node-rank": _SERVER,
    "--dist-init-addr": _SERVER,
    "--gated-launch-port": _SERVER,
    "--disaggregation-mode": _SERVER,
    "--encoder-only": _SERVER,
    "--tokenizer-worker-num": _SERVER,
    "--detokenizer-worker-num": _SERVER,
    "--dp-size": _SERVER,
    "--attn-dp-size": _SERVER,
    "--enable-dp-attention": _SERVER,
    "--device": "the recipe's GPUs are those of CUDA_VISIBLE_DEVICES",
    "--base-gpu-id": "select GPUs with CUDA_VISIBLE_DEVICES: what is visible is what was checked",
    "--gpu-id-step": "select GPUs with CUDA_VISIBLE_DEVICES: what is visible is what was checked",
    "--is-embedding": _SERVER,
    "--skip-tokenizer-init": _SERVER,
    "--dllm-algorithm": _SERVER,
    "--enable-pd-role-switch": _SERVER,
    "--moe-dp-size": _SIZES,
    "--attn-cp-size": _SIZES,
    "--dcp-size": _SIZES,
    "--dwdp-size": _SIZES,
    "--fastapi-root-path": "the engine would take it for its own paths that need no key; put a proxy in front",
    "--load-publish-endpoint": _TRAFFIC,
    "--kv-events-config": _TRAFFIC,
    "--enable-trace": _TRAFFIC,
    "--otlp-*": _TRAFFIC,
    "--skip-server-warmup": "readiness means that one request has gone through",
    "--forward-hooks": _FOREIGN,
    "--sidecar*": _FOREIGN,
    "--custom-weight-loader": _FOREIGN,
    "--model-impl": _FOREIGN,
    "--model-config-parser": _FOREIGN,
    "--tokenizer-path": _FOREIGN,
    "--download-dir": _FOREIGN,
    "--revision": "REVISION names the snapshot that must be on disk",
    "--speculative-*": _FOREIGN,
    "--decoupled-spec-*": _FOREIGN,
    "--enable-multi-layer-eagle": _FOREIGN,
    "--hicache-storage-backend": _FOREIGN,
    "--unified-cache-external-linker-*": _FOREIGN,
    "--uno-lora-path": _FOREIGN,
    "--enable-lora": _FOREIGN,
    "--lora-paths": _FOREIGN,
    "--remote-instance-*": _FOREIGN,
    "--quantization-param-path": _FOREIGN,
    "--enable-custom-logit-processor": "requests would bring code with them",
    "--delete-ckpt-after-loading": "a checkpoint is never touched",
    "--model-checksum": "the checkpoint is checked before; see docs/inspect.md",
    "--crash-dump-folder": "a dump would hold the API key and users' requests",
    "--debug-tensor-dump-*": "a dump would hold users' requests",
    "--decode-attention-backend": "give --attention-backend, which the recipe checks",
    "--prefill-attention-backend": "give --attention-backend, which the recipe checks",
    "--enable-two-batch-overlap": _STRICT,
    "--enable-waterfill": "it changes the all-to-all backend behind the plan: set A2A=deepep",
    "--enable-eplb": _STRICT,
    "--init-expert-location": _STRICT,
    "--ep-num-redundant-experts": _STRICT,
    "--elastic-ep-*": _STRICT,
    "--enable-elastic-expert-backup": _STRICT,
    "--enable-paged-experts": _STRICT,
    "--kt-*": _STRICT,
    "--enable-memory-saver": _STRICT,
    "--startup-weight-load-mode": _STRICT,
    "--weight-cache-mode": _STRICT,
    "--quantize-and-serve": _STRICT,
    "--rl-quant-profile": _STRICT,
    "--rl-on-policy-target": _STRICT,
    "--cpu-offload-gb": _STRICT,
    "--offload-*": _STRICT,
    "--checkpoint-engine-*": _STRICT,
}

#: The engine reads hundreds of variables that change models, loaders, kernels and ports. These change none of them.
ENGINE_VARIABLES = {
    "SGLANG_JIT_LOG_LEVEL",
    "SGLANG_LOG_MS",
    "SGLANG_TIMEOUT_KEEP_ALIVE",
    "SGLANG_TORCH_PROFILER_DIR",
    "SGLANG_WARMUP_TIMEOUT",
}
_ENGINE = re.compile(r"(SGLANG|SGL|DUMPER)_")
#: These change what is computed, in the libraries below it.
_NUMERICS = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"}
#: What Kubernetes sets in every pod for a Service of that name.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?\Z")


def flag(name: str) -> str | None:
    """Why the flag with this first spelling is refused, or None."""
    return next((reason for pattern, reason in FLAGS.items() if fnmatchcase(name, pattern)), None)


def environment(variables: Mapping[str, str]) -> None:
    """Raise Rejected for a set variable that would change the engine behind the plan, or that is a key."""
    for name, value in variables.items():
        if (_ENGINE.match(name) and name not in ENGINE_VARIABLES and not _link(name, value)) or name in _NUMERICS:
            raise Rejected(
                f"environment {name}: it would change the engine behind the plan; unset it (taken: "
                f"{', '.join(sorted(ENGINE_VARIABLES))})"
            )
        if name == "API_KEY":
            raise Rejected("environment API_KEY: every process of the container could read it; set API_KEY_FILE")


def _link(name: str, value: str) -> bool:
    found = _SERVICE_LINK.search(name)
    return found is not None and (found[0] != "_PORT" or value.startswith(("tcp://", "udp://")))


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """What of an accepted environment the engine gets; to it an empty variable is a set one."""
    return {
        name: value
        for name, value in variables.items()
        if not _ENGINE.match(name) or (value.strip() and name in ENGINE_VARIABLES)
    }
