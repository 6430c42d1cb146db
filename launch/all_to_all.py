"""What an all-to-all backend of the routed experts needs of a plan, said before the engine is started.

The engine's own admission (``deepep_admission`` of the patch series) says the same after it has imported everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launch.recipe import Recipe
from qualify.checkpoint.headers import Header
from qualify.errors import Rejected

FLAG = "--moe-a2a-backend"
NONE = "none"
#: Room for the tokens of one rank in DeepEP's low-latency mode: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK of
#: SGLang 0.5.23.
ROOM = 128


def settle(recipe: Recipe, asked: dict[str, tuple[Any, str]], target: str, model: str | None, tp: int) -> str:
    """The backend that is asked for; ``asked`` then has its EP size. Raises Rejected where the recipe has none such."""
    name = asked.get(FLAG, (NONE, ""))[0]
    if name == NONE:
        return name
    served = [entry for entry in recipe.all_to_all if entry.name == name]
    if not served:
        names = ", ".join([NONE, *(entry.name for entry in recipe.all_to_all)])
        raise Rejected(f"A2A={name}: {recipe.artifact} is served with {names}; no other backend takes its experts")
    [entry] = served
    if entry.models and model is not None and model not in entry.models:
        raise Rejected(f"A2A={name}: {model} has no routed experts; leave A2A out")
    if target not in entry.targets:
        raise Rejected(f"A2A={name} on {target}: {entry.reason}; it is served on {', '.join(entry.targets)}")
    if tp not in entry.tp:
        raise Rejected(f"A2A={name} with TP={tp}: it needs TP {' or '.join(map(str, entry.tp))}, GPUs of one host")
    ep, source = asked.setdefault("--ep-size", (tp, f"{name} spans all tensor-parallel ranks with whole experts"))
    if ep != tp:
        raise Rejected(
            f"A2A={name} with TP={tp} and EP={ep} ({source}): it spans all ranks; leave EP out, or set EP={tp}"
        )
    return name


def check(name: str, choices: Mapping[str, Any]) -> None:
    """Raises Rejected where the finished plan sends what its runner cannot take, or more at once than has room.

    The ranks of attention share a batch, padded to a multiple of their number, and each sends its slice: so together
    they have room for TP times as many tokens, and a decoding request is one token.
    """
    if name == NONE:
        return

    def value(flag: str, default: Any = None) -> Any:
        return choices[flag].value if flag in choices else default

    if (dtype := value("--deepep-dispatcher-output-dtype", "auto")) not in ("auto", "fp8"):
        raise Rejected(f"--deepep-dispatcher-output-dtype {dtype} with A2A={name}: its runner multiplies FP8; use fp8")
    mode, running = value("--deepep-mode", "auto"), value("--max-running-requests")
    if mode == "normal":
        return
    # Without the padding, a batch that does not divide is sent whole by every rank.
    room = ROOM * (1 if value("--disable-attn-tp-gather") else value("--tp-size", 1))
    if running and running > room:
        raise Rejected(
            f"MAX_RUNNING={running} with A2A={name}: low latency has room for {room} tokens, {ROOM} a rank; lower it"
        )
    if mode == "low_latency" and not 0 < (prefill := value("--chunked-prefill-size", 0)) <= room:
        raise Rejected(
            f"CHUNKED_PREFILL={prefill} with --deepep-mode low_latency: that mode has room for {room} tokens, {ROOM} a "
            "rank; set it between 1 and that, or leave the mode at auto"
        )


def replicated(name: str, headers: Iterable[Header]) -> int:
    """Bytes of the checkpoint that every rank holds whole under backend ``name``, which are its shared experts."""
    if name == NONE:
        return 0
    tensors = (tensor for header in headers for tensor in header.tensors)
    return sum(tensor.end - tensor.start for tensor in tensors if ".shared_experts." in tensor.name)
