"""Loads the tiny checkpoints on every rank of real process groups, and compares each rank's parameters with its share.

    python3 -B -m tests.engine.ownership --checkpoints DIR --out FILE

DIR holds one directory for each of ``MODELS``. The engine is imported once; then every topology of ``CASES`` gets as
many forked processes as it has ranks, which initialise the engine's distributed state over gloo and load the
checkpoint through ``DefaultModelLoader``. What a rank must hold follows from :func:`share` and the order of
``qualify.models.k2_horizon_sglang``, not from the engine's own bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, read_checkpoint
from qualify.models import k2_horizon_sglang
from tests import deep_ep_stand_in
from tests.engine import deepep_forward
from tests.engine.restoring import flip, load_presharded, updater

MODELS = ("dense", "kv2", "moe", "mova")

#: Seconds that the ranks of one topology may take together.
TIMEOUT = 120


@dataclass(frozen=True)
class Case:
    """One topology: ``pp`` stages of ``tp`` ranks, over which ``ep`` groups of experts are spread. ``a2a`` is the
    all-to-all backend, ``mode`` how it dispatches in the forward passes of experts that then follow the load. ``works``
    says whether it can serve the model; ``lacks`` is a tensor taken out of the files; a ``restored`` one comes from a
    presharded copy, which is also restored with a damaged file of the last rank."""

    model: str
    tp: int = 1
    ep: int = 1
    pp: int = 1
    a2a: str = "none"
    mode: str = "normal"
    works: bool = True
    lacks: str = ""
    restored: bool = False

    @property
    def name(self) -> str:
        """The topology as a test is named after it."""
        a2a = "" if self.a2a == "none" else f"-{self.a2a}-{self.mode}"
        lacks = f"-lacks-{self.lacks}" if self.lacks else ""
        restored = "-restored" if self.restored else ""
        return f"{self.model}-tp{self.tp}-ep{self.ep}-pp{self.pp}{a2a}{lacks}{restored}"


CASES = [
    Case("dense"),
    Case("dense", tp=2),
    Case("dense", tp=4),
    Case("dense", pp=2),
    Case("dense", tp=2, pp=2),
    Case("kv2", tp=4),
    Case("moe"),
    Case("moe", tp=2),
    Case("moe", tp=2, ep=2),
    Case("moe", tp=4, ep=2),
    Case("moe", tp=4, ep=4),
    Case("moe", pp=2),
    Case("moe", tp=2, ep=2, pp=2),
    Case("mova"),
    Case("mova", tp=2),
    Case("mova", tp=2, ep=2),
    Case("mova", tp=4, ep=2),
    Case("mova", tp=4, ep=4),
    Case("mova", pp=2),
    Case("mova", tp=2, ep=2, a2a="deepep"),
    Case("moe", tp=2, ep=2, restored=True),
    Case("mova", tp=2, ep=2, restored=True),
    Case("mova", tp=2, ep=2, a2a="deepep", mode="low_latency"),
    Case("moe", tp=2, ep=2, a2a="deepep"),
    Case("moe", tp=2, ep=2, a2a="deepep", mode="low_latency"),
    Case("mova", tp=4, ep=4, a2a="deepep", mode="low_latency"),
    Case("moe", tp=4, ep=4, a2a="deepep"),
    Case("dense", tp=2, ep=2, works=False),
    Case("moe", tp=4, works=False),
    Case("moe", tp=2, a2a="deepep", works=False),
    Case("mova", tp=4, works=False),
    Case("moe", tp=2, ep=2, lacks="model.layers.4.mlp.experts.3.up_proj.weight_scale"),
    Case("moe", pp=2, lacks="model.norm.weight"),
    Case("dense", pp=2, lacks="model.layers.0.self_attn.v_proj.weight"),
    Case("mova", tp=2, ep=2, lacks="model.layers.4.mlp.experts.12.up_proj.weight_scale_inv"),
]


@dataclass(frozen=True)
class Rank:
    """Where a process stands in its case."""

    case: Case
    tp_rank: int

    @property
    def moe_tp(self) -> int:
        """Ranks that share one routed expert; neighbours do."""
        return self.case.tp // self.case.ep

    def cut(self, tensor: torch.Tensor, axis: int, ways: int, index: int) -> torch.Tensor:
        """Part ``index`` of ``ways`` equal ones."""
        assert tensor.shape[axis] % ways == 0, (tensor.shape, axis, ways)
        extent = tensor.shape[axis] // ways
        return tensor.narrow(axis, index * extent, extent)


def share(name: str, tensor: torch.Tensor, rank: Rank, config: dict) -> torch.Tensor | None:
    """What ``rank`` keeps of a whole checkpoint tensor; None when it is another rank's expert."""
    tp, index = rank.case.tp, rank.tp_rank
    axis = 1 if re.search(r"\.(o_proj|down_proj)\.weight", name) else 0
    if match := re.search(r"\.mlp\.experts\.(\d+)\.", name):
        local = config["num_experts"] // rank.case.ep
        if int(match[1]) // local != index // rank.moe_tp:
            return None
        return rank.cut(tensor, axis, rank.moe_tp, index % rank.moe_tp)
    if re.search(r"\.self_attn\.(k_proj|v_proj|v_experts\.\d+)\.", name):
        ways = min(tp, config["num_key_value_heads"])
        return rank.cut(tensor, axis, ways, index * ways // tp)
    if ".shared_experts." in name and rank.case.a2a != "none":
        return tensor
    if re.search(r"\.(q_proj|gate_proj|o_proj|up_proj|down_proj)\.weight", name):
        return rank.cut(tensor, axis, tp, index)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        # Filled up with zeros to a multiple of 64 rows a rank.
        rows = -(-tensor.shape[0] // (64 * tp)) * 64 * tp
        padded = torch.zeros(rows, tensor.shape[1], dtype=tensor.dtype)
        padded[: tensor.shape[0]] = tensor
        return rank.cut(padded, 0, tp, index)
    return tensor


def wanted(config: dict, source: dict[str, torch.Tensor], rank: Rank, layers: range) -> dict:
    """Parameter -> (tensor of this rank, names it is made of), for the stage that holds ``layers``."""
    found = {}
    for parameter, pieces in k2_horizon_sglang.parameters(config).items():
        if not _on_stage(parameter, layers, config):
            continue
        parts: dict[int | None, list] = {}
        names = []
        for piece in sorted(pieces, key=lambda piece: (piece.expert is not None and piece.expert, piece.row)):
            part = share(piece.source, source[piece.source], rank, config)
            if part is not None:
                parts.setdefault(piece.expert, []).append(part)
                names.append(piece.source)
        whole = [torch.cat([_bits(part) for part in one]) for one in parts.values()]
        dtype = source[names[0]].dtype
        held = (torch.stack(whole) if None not in parts else whole[0]).view(dtype)
        if k2_horizon_sglang.WIDENED.fullmatch(parameter):
            held = held.float()
        found[parameter] = held, names
    return found


def differences(model, expected: dict) -> list[str]:
    """One line per parameter that is not bit for bit what is expected, in both directions."""
    live = dict(model.named_parameters())
    found = [f"{name}: not expected on this rank" for name in live.keys() - expected.keys()]
    for name, (held, _) in expected.items():
        if name not in live:
            found.append(f"{name}: not on this rank")
            continue
        here = live[name].data
        if (here.shape, here.dtype) != (held.shape, held.dtype):
            found.append(f"{name}: is {tuple(here.shape)} {here.dtype}, must be {tuple(held.shape)} {held.dtype}")
        elif not torch.equal(_bits(here), _bits(held)):
            found.append(f"{name}: differs")
    return sorted(found)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: FP8 is neither concatenated nor compared by every build of torch."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def _on_stage(parameter: str, layers: range, config: dict) -> bool:
    if match := re.match(r"model\.layers\.(\d+)\.", parameter):
        return int(match[1]) in layers
    first, last = layers.start == 0, layers.stop == config["num_hidden_layers"]
    return first if parameter == "model.embed_tokens.weight" else last


# --- processes --------------------------------------------------------------------------------------------------


def on_rank(case: Case, world_rank: int, meeting: str, directory: Path, intact: Path) -> dict:
    """What happened on one rank: its layers, names of the tensors it holds, differences; or the refusal."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    world = case.tp * case.pp
    without_gpu_communicators()
    os.environ.update(RANK=str(world_rank), WORLD_SIZE=str(world))
    parallel_state.init_distributed_environment(
        world_size=world, rank=world_rank, local_rank=world_rank, distributed_init_method=meeting, backend="gloo"
    )
    reset_context()
    args = ServerArgs(
        model_path="none",
        tp_size=case.tp,
        ep_size=case.ep,
        pp_size=case.pp,
        moe_a2a_backend=case.a2a,
        deepep_mode=case.mode,
        # The largest that fits: every rank takes its slice.
        chunked_prefill_size=128 * case.tp if case.mode == "low_latency" else None,
    )
    publish(args, role="test", ranks=SpawnRanks(world_rank=world_rank))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    if case.a2a != "none":
        deepep_forward.enable()
        deep_ep_stand_in.connect(get_parallel().tp_group.cpu_group)
    overrides = PROVENANCE if case.model == "mova" else {}
    told = {}
    try:
        if case.restored:
            copies = Path(meeting.removeprefix("file://")).parent / "copies"
            model, told = restore_on_rank(case, world_rank, directory, overrides, copies)
        else:
            model = engine_cpu.load_model(directory, overrides=overrides)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    config = json.loads((directory / "config.json").read_text())
    source = read_checkpoint(intact)
    layers = range(model.model.start_layer, model.model.end_layer)
    expected = wanted(config, source, Rank(case, world_rank % case.tp), layers)
    result = told | {
        "layers": [layers.start, layers.stop],
        "differences": differences(model, expected),
        "tensors": sorted(name for _, names in expected.values() for name in names),
    }
    if case.tp > 1:
        neighbour = wanted(config, source, Rank(case, (world_rank + 1) % case.tp), layers)
        result["like_neighbour"] = not differences(model, neighbour)
    if case.a2a != "none":
        result["slices"] = deepep_forward.slices()
        result["forward"] = deepep_forward.errors(model, source, world_rank)
    return result


def restore_on_rank(case: Case, world_rank: int, directory: Path, overrides: dict, copies: Path):
    """Make a copy, restore it, and then once more with a byte of the last rank's own file flipped.

    Returns the restored model as updates leave it, and what happened: whether the loads came from a copy
    (``restores``), what was said of the damaged one (``damaged``; None where this rank noticed nothing), ``updates``.
    """
    from sglang.srt.model_loader import presharded_copy
    from sglang.srt.model_loader.checkpoint_ledger import CheckpointRefused
    from sglang.srt.runtime_context import get_parallel

    presharded_copy.CACHE = str(copies.parent)
    _, first = load_presharded(directory, copies, overrides=overrides)
    model, second = load_presharded(directory, copies, overrides=overrides)
    get_parallel().world_group.barrier()  # the other ranks have read what is damaged now
    if world_rank == 0:
        flip(next(copies.glob(f"TP-*/*-rank-{case.tp * case.pp - 1:03d}.safetensor")))
    get_parallel().world_group.barrier()
    damaged = None
    try:
        load_presharded(directory, copies, overrides=overrides)
    except CheckpointRefused as error:
        damaged = str(error)
    return model, {
        "restores": [first, second],
        "damaged": damaged,
        "updates": update_on_rank(model, world_rank, directory),
    }


def update_on_rank(model, world_rank: int, directory: Path) -> list[bool]:
    """Whether an update went through: one that lacks a tensor on rank 1 alone, then the whole one, from disk."""
    whole = list(read_checkpoint(directory).items())
    lacking, message = updater(model).load_weights_from_distributed(whole[:-1] if world_rank == 1 else whole)
    complete, _ = updater(model).update_weights_from_disk(str(directory), "auto")
    return [lacking, "keeps its weights" in message, complete]


def without_gpu_communicators() -> None:
    """The groups stay what they are; only what would open a GPU for their collectives is not made."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl

    pynccl.PyNcclCommunicator = lambda **kwargs: None
    parallel_state.set_custom_all_reduce(False)


def run_case(case: Case, directory: Path, intact: Path, folder: Path) -> list[dict]:
    """Fork the ranks of a topology, which load ``directory``; return what each of them wrote."""
    world = case.tp * case.pp
    meeting = f"file://{folder}/meeting"
    children = {}
    for rank in range(world):
        if not (child := os.fork()):
            _child(case, rank, meeting, directory, intact, folder / f"{rank}.json")
        children[child] = rank
    deadline = time.monotonic() + TIMEOUT
    while children and time.monotonic() < deadline:
        done, _ = os.waitpid(-1, os.WNOHANG)
        children.pop(done, None)
        time.sleep(0.02)
    for child in children:
        os.kill(child, 9)
        os.waitpid(child, 0)
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else {"crashed": "no result"} for file in files]


def _child(case: Case, rank: int, meeting: str, directory: Path, intact: Path, out: Path) -> None:
    """The life of one rank; never returns."""
    try:
        result = on_rank(case, rank, meeting, directory, intact)
    except BaseException:
        result = {"crashed": traceback.format_exc()}
    out.write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="names of cases that contain this")
    args = parser.parse_args()
    engine_cpu.prepare_process()
    deep_ep_stand_in.install()
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.resolve_model_cls("K2HorizonForCausalLM")
    results = {}
    names = {model: sorted(read_checkpoint(args.checkpoints / model)) for model in MODELS}
    for case in CASES:
        if args.only and args.only not in case.name:
            continue
        directory = intact = args.checkpoints / case.model
        with tempfile.TemporaryDirectory() as folder:
            if case.lacks or not case.works:
                directory = Path(folder) / "checkpoint"
                directory.mkdir()
                (directory / "config.json").write_bytes((intact / "config.json").read_bytes())
            # Of a topology that cannot work only the config is there: whoever gets to the weights finds none.
            if case.lacks:
                tensors = read_checkpoint(intact)
                del tensors[case.lacks]
                save_file(tensors, directory / "model.safetensors")
            began = time.monotonic()
            ranks = run_case(case, directory, intact, Path(folder))
            told = {"ranks": ranks, "names": names[case.model], "seconds": time.monotonic() - began}
            results[case.name] = asdict(case) | told
    args.out.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
