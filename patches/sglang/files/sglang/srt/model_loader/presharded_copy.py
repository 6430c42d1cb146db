"""Restores strictly loaded models from a presharded copy: one that cannot be taken for another, or is refused.

The engine's PreshardedModelLoader keys a copy by topology, dtype and shapes, keeps it in the checkpoint and verifies
it on request only, so that two checkpoints of one shape are swapped in silence. For models with a checkpoint ledger
this loader takes its place, and keeps its plan, its files and its checksums:

* The key also has the identity of the checkpoint and of the engine (:func:`identity`), and what decides how a rank
  slices. Every part of it is compared again when a copy is read.
* A copy holds the parameters as ``load_weights`` left them, each under the hash of its bytes. Restoring is another
  source for the ledger: post-processing, scope and the right to serve are those of a first load.
* Copies lie below :data:`CACHE`, never in a checkpoint. They are written under another name, by one server at a time,
  and renamed when complete; a copy that is not what it was is refused and never made anew in silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sglang
import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.model_loader import checkpoint_files
from sglang.srt.model_loader.checkpoint_ledger import CheckpointRefused
from sglang.srt.model_loader.loader import DefaultModelLoader, PreshardedModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import get_exec, get_parallel

#: Copies are allowed below this folder only, and lie in ``ROOT`` unless ``presharded_path`` names another.
CACHE = "/var/cache"
ROOT = "/var/cache/horizon/presharded"

#: Bytes of every tensor that are part of a checkpoint's identity.
SAMPLE = 4096

#: What may differ between the ranks of one server: nodes have copies of one checkpoint.
_OF_A_NODE = "file_stamps_sha256"


def loader(load_config: Any, model_config: Any) -> PreshardedModelLoader:
    """The loader of ``--load-format presharded``: the strict one for every model that admission may see."""
    strict = getattr(getattr(model_config, "hf_config", None), "model_type", None) == "k2_horizon"
    quantised = getattr(model_config, "quantization", None) is not None
    return (StrictPresharded if strict and quantised else PreshardedModelLoader)(load_config)


class StrictPresharded(PreshardedModelLoader):
    """PreshardedModelLoader for models with a checkpoint ledger. Raises :class:`CheckpointRefused`."""

    def __init__(self, load_config: Any):
        if not (load_config.model_loader_extra_config or {}).get("verify_on_load", True):
            raise CheckpointRefused(
                "verify_on_load in --model-loader-extra-config is false, and a presharded copy is not served without "
                "its checksums: remove it."
            )
        super().__init__(load_config)
        self._verify_on_load = True

    def download_model(self, model_config: Any) -> None:
        """Look for the checkpoint itself, which is what identifies a copy."""
        DefaultModelLoader.download_model(self, model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Restore the model from its copy if there is one, or else load the checkpoint and make it."""
        key = self._collect_shard_config(model_config)
        folder = self._presharded_dir(model_config, key)
        device, group = torch.device(device_config.device), get_parallel().world_group
        there = all(group.all_gather_object(os.path.lexists(folder)))
        model = self.initialize_model_for_startup(model_config=model_config, device_config=device_config)
        with set_default_torch_dtype(model_config.dtype):
            if there:
                model.checkpoint_ledger.adopt(model, model_config.model_path, self._copied(folder, key))
            else:
                with _unfinished(folder, group) as unfinished:
                    self.load_weights_only(model, self._get_all_weights(model_config, model), device)
                    if unfinished:
                        self._write(model, unfinished, key)
                        # Files that were exchanged during the load would be kept under the name of their predecessors.
                        if not identified(model_config.model_path, group).items() <= key.items():
                            raise CheckpointRefused(
                                f"The checkpoint {model_config.model_path} was changed while it was loaded, and no "
                                "copy of it is kept: start again when nobody writes to it."
                            )
            self.postprocess_weights(model, device)
        self.counter_after_loading_weights = time.perf_counter()
        return model.eval()

    def _collect_shard_config(self, model_config: Any) -> dict[str, Any]:
        parallel, execution = get_parallel(), get_exec()
        # Some backends take up before gate, or another shape for the shared experts, while the weights are loaded.
        decisive = {
            "attn_tp": parallel.attn_tp_size,
            "moe_a2a_backend": str(execution.moe.moe_a2a_backend),
            "moe_runner_backend": str(execution.moe.moe_runner_backend),
            "fp8_gemm_runner_backend": str(execution.kernel.fp8_gemm_runner_backend),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        found = identified(model_config.model_path, parallel.world_group)
        return super()._collect_shard_config(model_config) | decisive | found

    def _presharded_dir(self, model_config: Any, shard_config: dict[str, Any] | None = None) -> str:
        draft = model_config.is_draft_model
        given = self._draft_presharded_path_override if draft else self._presharded_path_override
        key = shard_config or self._collect_shard_config(model_config)
        return os.path.join(checked_root(given, model_config.model_path), self._build_subfolder_name(key))

    def _write(self, model: torch.nn.Module, folder: str, key: dict[str, Any]) -> None:
        try:
            self._dump_state_to_disk(dict(model.named_parameters()), {}, folder, key)
        except (OSError, SafetensorError) as error:
            raise CheckpointRefused(
                f"The presharded copy cannot be written to {folder} ({error}): make room there, or start with "
                "--load-format safetensors."
            ) from error

    def _copied(self, folder: str, key: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter, verified CPU tensor) for everything that this rank reads of a copy."""
        try:
            yield from self._verified(folder, key)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointRefused(
                f"The presharded copy {folder} is not served, it {_rest(error)}: remove the folder, and the next "
                "start makes it again from the checkpoint."
            ) from error

    def _verified(self, folder: str, key: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        rank, world_size = self._world_rank_and_size()
        plan = checked_plan(folder, key, world_size, self)
        reads = plan["rank_to_reads"][str(rank)]
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(os.path.join(folder, name), framework="pt"))
                for name in {read["filename"] for read in reads}
            }
            threads = max(1, self._hash_num_threads)
            pool = stack.enter_context(ThreadPoolExecutor(threads))

            def fetch(read: dict[str, Any]) -> tuple[str, torch.Tensor]:
                tensor = files[read["filename"]].get_tensor(read["stored_key"])
                # A tensor's key is the hash of its shape, dtype and bytes.
                if self._hash_tensor(tensor) != read["stored_key"]:
                    raise ValueError(f"holds other bytes for {read['name']} in {read['filename']} than were written")
                return read["name"], tensor

            # A few at a time, or all of a rank's tensors would wait in memory for their turn.
            for start in range(0, len(reads), threads):
                yield from pool.map(fetch, reads[start : start + threads])
        try:
            self._verify_rank_checksum([(read["name"], read["stored_key"]) for read in reads], plan, rank, folder)
        except ValueError as error:
            raise ValueError(f"is not what its plan says for rank {rank}") from error


def identified(checkpoint: str, group: Any) -> dict[str, str]:
    """The :func:`identity` that all ranks of ``group`` see. Raises :class:`CheckpointRefused` where they differ."""
    everywhere = group.all_gather_object(identity(checkpoint))
    for rank, there in enumerate(everywhere):
        for part in everywhere[0].keys() - {_OF_A_NODE}:
            if there[part] != everywhere[0][part]:
                raise CheckpointRefused(
                    f"Rank {rank} sees another checkpoint or engine than rank 0 ({part} differs): give every "
                    "node the same image and the same checkpoint."
                )
    stamps = json.dumps([there[_OF_A_NODE] for there in everywhere])
    return everywhere[0] | {_OF_A_NODE: hashlib.sha256(stamps.encode()).hexdigest()}


def identity(checkpoint: str) -> dict[str, str]:
    """SHA-256 of what tells a checkpoint, and the engine that reads it, from others.

    ``config_sha256``: config.json, byte for byte. ``headers_sha256``: the index, and name and raw header of every
    shard: all names, dtypes, shapes and places. ``samples_sha256``: the first 4 KiB of every tensor, which two
    trainings of one architecture do not share. ``file_stamps_sha256``: size and time of every file, for an edit that
    the samples miss. ``engine_sha256``: the RECORD of the installed engine, which lists the hash of every file as the
    patch series left it. Raises :class:`CheckpointRefused`.
    """
    folder = Path(checkpoint)
    headers, samples, stamps = (hashlib.sha256() for _ in range(3))
    try:
        config = (folder / "config.json").read_bytes()
        index = folder / checkpoint_files.INDEX
        if index.is_file():
            headers.update(index.read_bytes())
        shards = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        for path in (folder / "config.json", *shards):
            status = path.stat()
            stamps.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns};".encode())
        for path in shards:
            _add_shard(path, headers, samples)
    except OSError as error:
        raise CheckpointRefused(
            f"{error.filename or folder} cannot be read ({error.strerror}), and --load-format presharded needs the "
            "checkpoint to know which copy belongs to it: serve a local directory."
        ) from error
    if not shards:
        raise CheckpointRefused(f"{folder} has no safetensors shard: serve a directory that holds the checkpoint.")
    return {
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "headers_sha256": headers.hexdigest(),
        "samples_sha256": samples.hexdigest(),
        _OF_A_NODE: stamps.hexdigest(),
        "engine_sha256": engine_digest(),
    }


def engine_digest() -> str:
    """SHA-256 of the RECORD of the engine that runs. Raises :class:`CheckpointRefused` where it has none."""
    for distribution in importlib.metadata.distributions(name="sglang"):
        record = distribution.read_text("RECORD")
        if record and os.path.realpath(distribution.locate_file("sglang/__init__.py")) == os.path.realpath(
            sglang.__file__
        ):
            return hashlib.sha256(record.encode()).hexdigest()
    raise CheckpointRefused(
        "The engine that runs has no RECORD of its files, by which a presharded copy is bound to it: install the "
        "patched wheel, or start with --load-format safetensors."
    )


def checked_root(given: str | None, checkpoint: str) -> str:
    """The folder of all copies, symbolic links resolved: below :data:`CACHE`, and in no checkpoint."""
    root, cache, source = map(os.path.realpath, (given or ROOT, CACHE, checkpoint))
    if not _inside(root, cache) or root == cache:
        raise CheckpointRefused(
            f"presharded_path {given or ROOT} lies in {root}, and copies are kept below {cache} only: mount a volume "
            "there and name a folder of it."
        )
    if _inside(root, source):
        raise CheckpointRefused(
            f"presharded_path {given or ROOT} lies in the checkpoint {source}, which is never written to: name another "
            f"folder below {cache}."
        )
    return root


def checked_plan(folder: str, key: dict[str, Any], world_size: int, names: type | Any) -> dict[str, Any]:
    """The plan of a complete copy that was made for ``key``. Raises ``ValueError`` with the rest of a sentence.

    Looks at names, kinds, sizes and headers of the files, not at tensors. ``names`` has the file names of the format.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise ValueError("is no folder but a link or a file")
    found = {entry.name: entry for entry in os.scandir(folder)}
    for name, entry in found.items():
        if not entry.is_file(follow_symlinks=False):
            raise ValueError(f"has {name}, which is no plain file")
    if names.READY_FILENAME not in found:
        raise ValueError(f"is not complete, it has no {names.READY_FILENAME}")
    plan = json.loads(Path(folder, names.CHECKSUM_FILENAME).read_bytes())
    made_for = plan["shard_config"]
    wanted = json.loads(json.dumps(key))
    if made_for != wanted:
        differing = sorted(part for part in wanted if made_for.get(part) != wanted[part])
        raise ValueError(f"was made for another checkpoint, engine or topology ({', '.join(differing)})")
    if (plan["version"], plan["world_size"]) != (names.PLAN_VERSION, world_size):
        raise ValueError(f"was made by {plan['world_size']} ranks in version {plan['version']} of its format")
    files = {file["filename"]: file for file in plan["files"]}
    for name in sorted(files.keys() ^ (found.keys() - {names.READY_FILENAME, names.CHECKSUM_FILENAME})):
        raise ValueError(f"lacks {name}" if name in files else f"has {name}, which its plan does not name")
    for name, file in files.items():
        try:
            header = checkpoint_files.read_header(Path(folder, name))
        except ValueError as error:
            raise ValueError(f"has {name}, which {error}") from error
        if header.keys() != {tensor["stored_key"] for tensor in file["tensors"]}:
            raise ValueError(f"has {name}, which holds other tensors than its plan says")
    return plan


@contextlib.contextmanager
def _unfinished(folder: str, group: Any) -> Iterator[str | None]:
    """An empty folder beside ``folder``, which becomes it when the block ends well; the same one on every rank.

    None where another server is making this copy: then nobody waits for it, and none is made. Rank 0 holds a lock
    meanwhile, so that what an interrupted server left can be told from what another one is writing.
    """
    beside = Path(folder).with_name(f".{Path(folder).name}.unfinished")
    told: Any = None
    with contextlib.ExitStack() as stack:
        if group.rank_in_group == 0:
            try:
                beside.parent.mkdir(parents=True, exist_ok=True)
                lock = os.open(beside.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o660)
                stack.callback(os.close, lock)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(beside)
                    beside.mkdir()
                    stack.callback(_remove, beside)
                    told = str(beside)
            except OSError as error:
                told = CheckpointRefused(
                    f"The presharded copy cannot be written to {beside.parent} ({error.strerror}): mount a volume "
                    "there that the server may write to, or start with --load-format safetensors."
                )
        told = group.broadcast_object(told)
        if isinstance(told, Exception):
            raise told
        yield told
        if told and group.rank_in_group == 0 and not os.path.lexists(folder):
            os.rename(told, folder)
        group.barrier()


def _add_shard(path: Path, headers: Any, samples: Any) -> None:
    try:
        entries = checkpoint_files.read_header(path)
    except ValueError as error:
        raise CheckpointRefused(f"{path.name} {error}") from error
    with path.open("rb") as file:
        length = file.read(8)
        begin = 8 + int.from_bytes(length, "little")
        headers.update(path.name.encode() + length + file.read(begin - 8))
        for first, last in sorted(entry["data_offsets"] for entry in entries.values()):
            samples.update(os.pread(file.fileno(), min(SAMPLE, last - first), begin + first))


def _inside(path: str, folder: str) -> bool:
    return os.path.commonpath((path, folder)) == folder


def _remove(path: Path) -> None:
    """Remove a folder, or a link that stands in its place and not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _rest(error: Exception) -> str:
    """The rest of a sentence that begins with the copy."""
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return f"has a damaged plan ({type(error).__name__}: {error})"
