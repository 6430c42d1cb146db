"""What an all-to-all backend of the routed experts needs of a plan, said before the engine is started.

The engine's own admission (``deepep_admission`` of the patch series) says the same after it has imported everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.recipe import Recipe
from qualify.errors import Rejected

FLAG = "--moe-a2a-backend"
NONE = "none"
#: Room for the tokens of one rank in DeepEP's low-latency mode: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK of
#: SGLang 0.5.23. A decoding request is one token, and all of them may be one rank's.
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
    """Raises Rejected where the finished plan has more requests than the backend has room for."""
    running = choices.get("--max-running-requests")
    mode = choices.get("--deepep-mode")
    if name != NONE and running and running.value > ROOM and not (mode and mode.value == "normal"):
        raise Rejected(
            f"MAX_RUNNING={running.value} with A2A={name}: a rank has room for {ROOM} tokens in low latency; lower it"
        )
