#!/usr/bin/env python3
"""Build one artifact's image twice, from the base up and without any build cache, and compare the layers.

    reproduce.py ARTIFACT --cache DIR

Equal layer digests: exit 0. Otherwise each differing layer is named with the files that differ in it, exit 1.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from images import base, build, stage, wheels
from images.cache import exclusive
from images.docker import Docker, find
from qualify.errors import CannotRun, Parser, Rejected, exit_code


def build_afresh(docker: Docker, artifact: str, cache: Path) -> str:
    """Bootstrap a base of its own, stage, build without the engine's build cache, and return the image ID.

    The context has one path in every build: BuildKit keeps a copy of each path's 4 GB.
    """
    if image := build.base_image():
        context, identity = stage.stage(artifact, cache, {"image": image})
        return build.docker_build(docker, context, identity, "--no-cache")
    with tempfile.TemporaryDirectory(dir=cache, prefix="reproduce.") as fresh:
        context, identity = stage.stage(artifact, cache, {"rootfs": base.build(Path(fresh), build.strict())})
        return build.docker_build(docker, context, identity, "--no-cache")


def contents(layer: IO[bytes]) -> dict[str, str]:
    """Path -> everything that a layer says of it: type, mode, owner, time, link target, content digest."""
    entries = {}
    with tarfile.open(fileobj=layer, mode="r|") as tar:
        for member in tar:
            digest = hashlib.file_digest(tar.extractfile(member), "sha256").hexdigest() if member.isreg() else ""
            facts = (member.type, oct(member.mode), member.uid, member.gid, member.mtime, member.linkname, digest)
            entries[member.name] = " ".join(map(str, facts))
    return entries


def saved_layers(docker: Docker, image: str) -> list[dict[str, str]]:
    """The contents of each layer in order, read from `docker save` as a stream: nothing is written to disk."""
    layers, manifest = {}, []
    with (
        subprocess.Popen([docker.path, "save", image], stdout=subprocess.PIPE) as process,
        tarfile.open(fileobj=process.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if member.name == "manifest.json":
                manifest = json.load(archive.extractfile(member))[0]["Layers"]
            elif member.isreg():
                # Layers are <id>/layer.tar or, in the OCI layout, blobs beside JSON documents.
                with contextlib.suppress(tarfile.ReadError):
                    layers[member.name] = contents(archive.extractfile(member))
    return [layers[name] for name in manifest]


def compare(docker: Docker, images: list[str]) -> list[str]:
    """One line for each differing layer and for each differing file in it; empty where the images are equal."""
    layers = [docker.inspect(image)["RootFS"]["Layers"] for image in images]
    if len(layers[0]) != len(layers[1]):
        return [f"{len(layers[0])} layers and {len(layers[1])}"]
    differing = [n for n, (first, second) in enumerate(zip(*layers, strict=True)) if first != second]
    if not differing:
        return []
    saved = [saved_layers(docker, image) for image in images]
    lines = []
    for n in differing:
        left, right = saved[0][n], saved[1][n]
        names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
        lines.append(f"layer {n}: {layers[0][n]} and {layers[1][n]}, {len(names)} paths differ")
        lines += [f"  {name}: {left.get(name, 'absent')} | {right.get(name, 'absent')}" for name in names[:50]]
    return lines


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--cache", type=Path, required=True)
    args = parser.parse_args()
    cache = args.cache.resolve()
    if args.artifact not in stage.artifacts():
        raise Rejected(f"ARTIFACT={args.artifact}: unknown; there are {', '.join(stage.artifacts())}")
    docker = find()
    with exclusive(cache):
        wheels.fetch(wheels.read_lock(), cache / "wheels")
        if (free := shutil.disk_usage(cache).free) < 25e9:
            raise CannotRun(f"disk full: two builds need about 22 GB, {free / 1e9:.0f} GB are free")
        images = []
        try:
            for _ in range(2):
                images.append(build_afresh(docker, args.artifact, cache))
            lines = compare(docker, images)
            layers = docker.inspect(images[0])["RootFS"]["Layers"]
        finally:
            for image in set(images):
                if not docker.inspect(image)["RepoTags"]:
                    docker.output("image", "rm", image)
    print("\n".join(lines) or "the two builds have equal layers:")
    if lines:
        return 1
    print("\n".join(f"  {digest}" for digest in layers))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
