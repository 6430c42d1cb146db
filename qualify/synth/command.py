"""``python3 -m qualify synth``: write a synthetic checkpoint in the layout of a published config."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from qualify.errors import CannotRun, Rejected
from qualify.models import k2_horizon
from qualify.synth import layout, writer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--config", required=True, type=Path, help="a published config.json, byte for byte")
    parser.add_argument("--out", required=True, type=Path, help="directory to create; must not hold anything")
    parser.add_argument("--tiny", action="store_true", help="same structure, reduced dimensions (megabytes)")
    parser.add_argument("--layers", type=int, metavar="N", help="number of layers, dense prefix included")
    parser.add_argument("--seed", type=int, default=0, help="seed of all values (default 0)")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what it is; see :func:`synthesise` for the errors."""
    if not args.tiny and args.layers is None:
        raise Rejected("say --tiny, --layers N (true width), or both")
    manifest = synthesise(args.config, args.out, tiny=args.tiny, layers=args.layers, seed=args.seed)
    print(f"{args.out}: {manifest['tensors']:,} tensors, {manifest['bytes']:,} bytes, synthetic")
    return 0


def synthesise(config_path: Path, out: Path, *, tiny: bool, layers: int | None = None, seed: int = 0) -> dict:
    """Write a synthetic checkpoint to ``out`` and return its manifest.

    Raises ``Rejected`` for a wrong config or an ``out`` in use, ``CannotRun`` without numpy or disk space.
    """
    writer.refuse_existing(out)
    raw = _read(config_path)
    try:
        source = json.loads(raw)
    except ValueError as error:
        raise Rejected(f"--config {config_path} is not JSON: {error}") from error
    if not isinstance(source, dict):
        raise Rejected(f"--config {config_path} is not a JSON object")
    config = layout.derive_config(source, tiny=tiny, layers=layers)
    inventory = k2_horizon.tensors(config)
    shards = layout.plan_shards(inventory, layout.TINY_SHARD_BYTES if tiny else layout.SHARD_BYTES)
    try:
        from qualify.synth import values  # numpy: the engine image has it, a bare host need not
    except ImportError as error:
        raise CannotRun("numpy is missing; run this command inside the engine image") from error
    knobs = values.Knobs()
    generator = values.NumpyValues(seed, knobs)
    manifest = {
        "synthetic": True,
        "note": "Random values in a published tensor layout; not a trained model, qualifies nothing.",
        "source_config_sha256": hashlib.sha256(raw).hexdigest(),
        "seed": seed,
        "generator": values.GENERATOR,
        "knobs": asdict(knobs),
        "tiny": tiny,
        "layers": config["num_hidden_layers"],
        "tensors": len(inventory),
        "bytes": sum(tensor.nbytes for tensor in inventory.values()),
    }
    writer.write_checkpoint(
        out,
        config=config,
        inventory=inventory,
        shards=shards,
        metadata={layout.MARK: "true", "seed": str(seed)},
        manifest=manifest,
        chunks=lambda name, tensor: generator.chunks(name, tensor, _columns(name, inventory)),
    )
    return manifest


def _columns(name: str, inventory) -> int:
    """Input columns of the weight that tensor ``name`` is or scales."""
    weight = name.replace(".weight_scale_inv", ".weight").replace(".weight_scale", ".weight")
    return inventory[weight].shape[-1]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Rejected(f"--config {path} cannot be read: {error.strerror}") from error
