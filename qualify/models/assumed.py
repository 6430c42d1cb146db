"""Configs of checkpoints whose ``config.json`` is not at hand, for synthetic checkpoints only. Standard library only.

Each is a published config with other values on top. ``KNOWN`` ones are public facts of the checkpoint; ``ASSUMED`` ones
are this project's guess, with the reason. A synthetic checkpoint made from one carries their names in
``synthetic.json``. Nothing that is served, inspected or catalogued reads this module.
"""

from __future__ import annotations

import json
from typing import Any

from qualify.models import DENSE_CONFIG, k2_horizon

#: What is public of IFM/K2-Horizon-375B-A23B-FP8: sizes, and that the routed experts alone are quantised.
KNOWN_375B = {
    "hidden_size": 6144,
    "num_hidden_layers": 61,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_head_dim": 64,
    "num_experts": 192,
    "moe_intermediate_size": 1792,
    "mlp_only_layers": [0, 1, 2],
    "layernorm_num_groups": 1,
}

#: name -> (value, why). The checkpoint is said to have about 391 GB and 23 billion active parameters.
ASSUMED_375B = {
    "intermediate_size": (14336, "8 times moe_intermediate_size, as in MoVA 36B; 390.3 GB in all"),
    "num_experts_per_tok": (8, "as in MoVA 36B; 23.4 billion active parameters without embedding and head"),
    "num_shared_experts": (1, "as in MoVA 36B"),
    "moe_gate_bias": (True, "as in MoVA 36B"),
    "router_scaling_factor": (2.5, "as in MoVA 36B"),
    "quantization_config.ignore": ("full names", "as compressed-tensors writes them: every other linear module"),
}


def config_375b() -> dict[str, Any]:
    """The 375B-A23B-FP8 as far as it is known, completed by :data:`ASSUMED_375B`; the rest is the published 7B's."""
    config = json.loads(DENSE_CONFIG.read_text()) | KNOWN_375B
    config |= {name: value for name, (value, _) in ASSUMED_375B.items() if "." not in name}
    outside = [module for module in k2_horizon.modules(config) if module.kind == "linear" and not module.routed]
    config["quantization_config"]["ignore"] = [module.name for module in outside]
    return config


#: name on the command line -> (config, names of its assumptions)
CONFIGS = {"375b-a23b": (config_375b, tuple(ASSUMED_375B))}
