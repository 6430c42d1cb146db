"""Which image: configuration digest, layer diff IDs and, once pushed, manifest digest, as ``docker`` tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.errors import Rejected
from qualify.receipt.canonical import parse, read

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_PUSHED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}\Z")
_CONFIG_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
VERSION = "org.opencontainers.image.version"


@dataclass(frozen=True, slots=True)
class Image:
    """One image; digests are "sha256:" and 64 hex digits."""

    config_digest: str
    #: of the uncompressed layers, in order
    diff_ids: tuple[str, ...]
    #: None where the image is known by its digests alone
    labels: dict[str, str] | None = None
    repo_digests: tuple[str, ...] = ()
    manifest_digest: str = ""


def from_inspect(document: Any, what: str = "the inspect JSON") -> Image:
    """The image of a ``docker image inspect`` document (the list of one image, or that image). Raises ``Rejected``."""
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    try:
        kind = (document.get("Descriptor") or {}).get("mediaType", _CONFIG_TYPES[0])
        labels = document["Config"].get("Labels") or {}
        image = Image(
            document["Id"],
            tuple(document["RootFS"]["Layers"]),
            {str(key): str(value) for key, value in labels.items()},
            tuple(document.get("RepoDigests") or ()),
        )
    except (AttributeError, KeyError, TypeError):
        raise Rejected(f"{what} is not the output of `docker image inspect` for one image") from None
    if kind not in _CONFIG_TYPES:
        raise Rejected(
            f"{what} comes from an engine with the containerd image store, whose Id is no configuration digest: "
            "give --config-digest and --diff-id, or inspect the image where the store is overlay2"
        )
    return checked(image, what)


def checked(image: Image, what: str) -> Image:
    """The image itself. Raises ``Rejected`` where a digest is none."""
    digests = (image.config_digest, *image.diff_ids)
    if not image.diff_ids or not all(isinstance(digest, str) and _DIGEST.match(digest) for digest in digests):
        raise Rejected(f"{what} lacks a configuration digest or diff IDs (sha256: and 64 hex digits)")
    return image


def read_inspect(path: Path) -> Image:
    """The image of a file with ``docker image inspect`` output. Raises ``Rejected``."""
    return from_inspect(parse(read(path, "--image-inspect"), "--image-inspect"), "--image-inspect")


def pushed(image: Image, reference: str) -> Image:
    """The image with the manifest digest of ``name@sha256:...``, which the engine must know as this image's."""
    if not _PUSHED.match(reference):
        raise Rejected("--pushed: give name@sha256:<64 hex digits>, as `docker push` prints it")
    if reference not in image.repo_digests:
        raise Rejected(
            "--pushed: the inspected image was never pushed or pulled under that digest (RepoDigests); "
            "inspect it again after the push"
        )
    digest = reference.partition("@")[2]
    return Image(image.config_digest, image.diff_ids, image.labels, image.repo_digests, digest)


def compare_labels(image: Image, identity: dict[str, Any]) -> bool:
    """Whether the labels are those of the identity that ran; False where there are no labels to compare.

    Raises ``Rejected`` where they differ: then another image ran.
    """
    if image.labels is None:
        return False
    base = identity["base"]
    wanted = {
        "io.horizon-images.artifact": identity["artifact"],
        "org.opencontainers.image.revision": identity["source_sha256"],
        "io.horizon-images.series": f"sha256:{identity['series_sha256']}",
        "io.horizon-images.engine.wheel": f"sha256:{identity['engine']['wheel_sha256']}",
        "org.opencontainers.image.base.digest": f"sha256:{base_sha256(base)}",
    }
    for key, value in wanted.items():
        if image.labels.get(key) != value:
            raise Rejected(f"the image is not the one that ran: its label {key} differs from run.json's identity")
    return True


def base_sha256(base: dict[str, Any]) -> str:
    """The digest of the base: of the Debian root file system, or of the image taken in its place."""
    return base["image"].partition("@sha256:")[2] if "image" in base else base["rootfs_sha256"]
