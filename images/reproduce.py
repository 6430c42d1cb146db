#!/usr/bin/env python3
"""Build one artifact's image twice, from the base up and without any build cache, and compare the layers.

    reproduce.py ARTIFACT --cache DIR

Equal layer digests: exit 0. Otherwise each differing layer is named with the files that differ in it, exit 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from images import base, build, stage, wheels
from images.docker import Docker, find
from qualify.errors import CannotRun, Rejected, exit_code


def build_afresh(docker: Docker, artifact: str, cache: Path) -> str:
    """Bootstrap, stage and build into a cache of its own (wheels linked), and return the image ID."""
    with tempfile.TemporaryDirectory(dir=cache, prefix="reproduce.") as name:
        fresh = Path(name)
        shutil.copytree(cache / "wheels", fresh / "wheels", copy_function=_link)
        if image := build.base_image():
            context, identity = stage.stage(artifact, fresh, {"image": image})
        else:
            context, identity = stage.stage(artifact, fresh, {"rootfs": base.build(fresh, strict=False)})
        return build.docker_build(docker, context, identity, "--no-cache")


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def contents(archive: Path) -> dict[str, str]:
    """Path -> everything that a layer says of it: type, mode, owner, time, link target, content digest."""
    entries = {}
    with tarfile.open(archive) as layer:
        for member in layer:
            digest = ""
            if member.isreg():
                digest = hashlib.file_digest(layer.extractfile(member), "sha256").hexdigest()
            facts = (member.type, oct(member.mode), member.uid, member.gid, member.mtime, member.linkname, digest)
            entries[member.name] = " ".join(map(str, facts))
    return entries


def layer_archives(docker: Docker, image: str, folder: Path) -> list[Path]:
    """The layers of a saved image in order, as tar files below ``folder``."""
    archive = folder / "image.tar"
    docker.output("save", "--output", str(archive), image)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return [folder / name for name in json.loads((folder / "manifest.json").read_text())[0]["Layers"]]


def compare(docker: Docker, images: tuple[str, str], cache: Path) -> list[str]:
    """One line for each differing layer and for each differing file in it; empty where the images are equal."""
    layers = [docker.inspect(image)["RootFS"]["Layers"] for image in images]
    if len(layers[0]) != len(layers[1]):
        return [f"{len(layers[0])} layers and {len(layers[1])}"]
    differing = [n for n, (first, second) in enumerate(zip(*layers, strict=True)) if first != second]
    lines = []
    with tempfile.TemporaryDirectory(dir=cache) as first, tempfile.TemporaryDirectory(dir=cache) as second:
        if differing:
            archives = [
                layer_archives(docker, image, Path(folder))
                for image, folder in zip(images, (first, second), strict=True)
            ]
        for n in differing:
            left, right = contents(archives[0][n]), contents(archives[1][n])
            names = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
            lines.append(f"layer {n}: {layers[0][n]} and {layers[1][n]}, {len(names)} paths differ")
            lines += [f"  {name}: {left.get(name, 'absent')} | {right.get(name, 'absent')}" for name in names[:50]]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--cache", type=Path, required=True)
    args = parser.parse_args()
    cache = args.cache.resolve()
    if args.artifact not in stage.artifacts():
        raise Rejected(f"ARTIFACT={args.artifact}: unknown; there are {', '.join(stage.artifacts())}")
    docker = find()
    with build.exclusive(cache):
        wheels.fetch(wheels.read_lock(), cache / "wheels")
        if (free := shutil.disk_usage(cache).free) < 30e9:
            raise CannotRun(f"disk full: two builds need about 30 GB, {free / 1e9:.0f} GB are free")
        images = (build_afresh(docker, args.artifact, cache), build_afresh(docker, args.artifact, cache))
        lines = compare(docker, images, cache)
    print("\n".join(lines) or "the two builds have equal layers:")
    if lines:
        return 1
    for digest in docker.inspect(images[0])["RootFS"]["Layers"]:
        print(f"  {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
