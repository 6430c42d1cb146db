"""``python3 -m qualify synth``: write a synthetic checkpoint in the layout of a published config."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from qualify.errors import CannotRun, Rejected
from qualify.models import PUBLISHED, assumed, k2_horizon
from qualify.synth import conditioning, layout, tokenizer, writer

#: Shards written at a time from a GPU. The values come faster than one file takes them; each needs about 64 MB of
#: pinned memory and ten times as much on the GPU. A CPU is busy with the values of one.
GPU_JOBS = 8

#: Bytes of values from which a CPU takes long enough to say so.
SLOW_BYTES = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="a published config.json, byte for byte")
    source.add_argument("--assumed", choices=sorted(assumed.CONFIGS), help="a checkpoint whose config is not at hand")
    parser.add_argument("--out", required=True, type=Path, help="directory to create; must not hold anything")
    parser.add_argument("--tiny", action="store_true", help="same structure, reduced dimensions (megabytes)")
    parser.add_argument("--layers", type=int, metavar="N", help="the first N layers, dense prefix included")
    parser.add_argument("--full", action="store_true", help="everything that the config describes (gigabytes)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all values (default 0)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where values are drawn; the same bytes either way (default: a GPU if there is one)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what it is; see :func:`synthesise` for the errors."""
    if args.full and (args.tiny or args.layers is not None):
        raise Rejected("--full contradicts --tiny and --layers; say one of them")
    if not (args.full or args.tiny or args.layers is not None):
        raise Rejected("say --full, --tiny, --layers N (true width), or --tiny with --layers N")
    if args.config is not None:
        require_published(args.config)
    started = time.monotonic()
    source = args.assumed or args.config
    manifest = synthesise(source, args.out, tiny=args.tiny, layers=args.layers, seed=args.seed, device=args.device)
    print(
        f"{args.out}: {manifest['tensors']:,} tensors, {manifest['bytes']:,} bytes, synthetic, "
        f"{time.monotonic() - started:.1f} s"
    )
    return 0


def require_published(path: Path) -> None:
    """Raise ``Rejected`` unless the file is, byte for byte, one of the published configs that are known here.

    Any other config would make a checkpoint in a layout that nobody has published.
    """
    known = {hashlib.sha256(file.read_bytes()).hexdigest(): file.name for file in PUBLISHED.glob("*.config.json")}
    if _published(path)[1]["source_config_sha256"] not in known:
        raise Rejected(
            f"--config {path} is none of the published configs, byte for byte: give one of qualify/models/published/ "
            f"({', '.join(sorted(known.values()))})"
        )


def synthesise(
    source: Path | str,
    out: Path,
    *,
    tiny: bool = False,
    layers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    knobs: conditioning.Knobs | None = None,
    jobs: int | None = None,
) -> dict:
    """Write a synthetic checkpoint to ``out`` and return its manifest.

    ``source`` is the path of a published config, or the name of one in :data:`qualify.models.assumed.CONFIGS`.
    ``device`` is ``cpu``, ``cuda`` or ``auto``; ``jobs`` the number of shards written at a time. Neither has an
    influence on the values. Raises ``Rejected`` for a wrong config or an ``out`` in use, ``CannotRun`` without
    torch, the device or disk space.
    """
    writer.refuse_existing(out)
    whole, provenance = _assumed(source) if isinstance(source, str) else _published(source)
    config = layout.derive_config(whole, tiny=tiny, layers=layers)
    inventory = k2_horizon.tensors(config)
    shards = layout.plan_shards(inventory, layout.shard_bytes(config, tiny))
    size = sum(tensor.nbytes for tensor in inventory.values())
    writer.refuse_full(out, size)
    try:
        import torch

        from qualify.synth import values
    except ImportError as error:
        raise CannotRun(f"{error.name} is missing; run this command inside the engine image") from error
    place = _device(device, torch)
    if place.type == "cpu" and size >= SLOW_BYTES:
        print(
            f"synth: {size / 1e9:.1f} GB drawn on a CPU, about 10 s a GB on one free core; see --device cuda",
            file=sys.stderr,
        )
    knobs = knobs or conditioning.Knobs()
    source_of_values = values.Values(config, inventory, seed=seed, knobs=knobs, device=place)
    manifest = {
        "synthetic": True,
        "note": "Random values in a published tensor layout; not a trained model, qualifies nothing.",
        **provenance,
        "seed": seed,
        "generator": values.GENERATOR,
        "device": place.type if place.type == "cpu" else torch.cuda.get_device_name(place),
        "torch": torch.__version__,
        "knobs": asdict(knobs),
        "clusters": source_of_values.clusters,
        "tiny": tiny,
        "layers": config["num_hidden_layers"],
        "tensors": len(inventory),
        "bytes": size,
    }
    try:
        writer.write_checkpoint(
            out,
            documents={"config.json": config, "synthetic.json": manifest, **tokenizer.documents(config)},
            inventory=inventory,
            shards=shards,
            metadata={layout.MARK: "true", "seed": str(seed)},
            payload=source_of_values.payload,
            jobs=jobs or (1 if place.type == "cpu" else GPU_JOBS),
        )
    except torch.OutOfMemoryError as error:
        raise CannotRun(
            "the GPU has too little free memory (about 8 GB are needed); nothing was left behind"
        ) from error
    return manifest


def _device(wanted: str, torch):
    """The torch device that ``wanted`` names; ``auto`` takes a GPU when there is one."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise CannotRun(
            "--device cuda, but torch finds no usable GPU; start the container with one, or say --device cpu"
        )
    return torch.device(wanted)


def _published(path: Path) -> tuple[dict, dict]:
    """(config, what the manifest says of it) of a file."""
    try:
        raw = path.read_bytes()
        config = json.loads(raw)
    except OSError as error:
        raise Rejected(f"--config {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Rejected(f"--config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise Rejected(f"--config {path} is not a JSON object")
    return config, {"source_config_sha256": hashlib.sha256(raw).hexdigest()}


def _assumed(name: str) -> tuple[dict, dict]:
    """The same of a config that stands on assumptions, which the manifest names."""
    make, assumptions = assumed.CONFIGS[name]
    return make(), {"source_config_sha256": None, "assumed": {"config": name, "keys": list(assumptions)}}
