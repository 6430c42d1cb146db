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
    "--uno-lora-path": _FOREIGN,
    "--enable-lora": _FOREIGN,
    "--lora-paths": _FOREIGN,
    "--remote-instance-*": _FOREIGN,
    "--quantization-param-path": _FOREIGN,
    "--enable-custom-logit-processor": "requests would bring code with them",
    "--model-checksum": "the checkpoint is checked before; see docs/inspect.md",
    "--crash-dump-folder": "a dump would hold the API key and users' requests",
    "--debug-tensor-dump-*": "a dump would hold users' requests",
    "--decode-attention-backend": "give --attention-backend, which the recipe checks",
    "--prefill-attention-backend": "give --attention-backend, which the recipe checks",
    "--enable-two-batch-overlap": _STRICT,
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
}

#: The engine reads hundreds of variables that change models, loaders, kernels and ports. These change none of them.
ENGINE_VARIABLES = {
    "SGLANG_CACHE_DIR",
    "SGLANG_JIT_LOG_LEVEL",
    "SGLANG_LOG_MS",
    "SGLANG_TIMEOUT_KEEP_ALIVE",
    "SGLANG_TORCH_PROFILER_DIR",
    "SGLANG_WARMUP_TIMEOUT",
}
_ENGINE = re.compile(r"(SGLANG|SGL|DUMPER)_")


def flag(name: str) -> str | None:
    """Why the flag with this first spelling is refused, or None."""
    return next((reason for pattern, reason in FLAGS.items() if fnmatchcase(name, pattern)), None)


def environment(variables: Mapping[str, str]) -> None:
    """Raise Rejected for a set variable that would change the engine behind the plan, or that is a key."""
    for name in variables:
        if _ENGINE.match(name) and name not in ENGINE_VARIABLES:
            raise Rejected(
                f"environment {name}: it would change the engine behind the plan; unset it (taken: "
                f"{', '.join(sorted(ENGINE_VARIABLES))})"
            )
        if name == "API_KEY":
            raise Rejected("environment API_KEY: every process of the container could read it; set API_KEY_FILE")
