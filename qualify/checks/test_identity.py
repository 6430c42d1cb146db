"""Stage "identity": /opt/horizon holds exactly the files, packages and patches that its identity names.

What lies outside, the Debian base, is bound by the digest of its layer and not hashed again here. In the GPU tier,
folders that the host's libraries are mounted over are left out, and run.json names them: such a run is no release.
"""

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import testinfra

from qualify.run import TIER
from qualify.suite.rundir import VARIABLE, RunDirectory

HOME = Path("/opt/horizon")
SITE = HOME / "venv/lib/python3.11/site-packages"


@pytest.fixture(scope="session")
def identity():
    return json.loads((HOME / "identity.json").read_text())


@pytest.fixture(scope="session")
def host():
    return testinfra.get_host("local://")


@pytest.fixture(scope="session")
def manifest(identity):
    """Path -> SHA-256 over all build steps; a later step overrides an earlier one."""
    entries = {}
    for step in ("cuda", "torch", "kernels", "python", "sglang", "runtime", "patches", "artifact"):
        text = (HOME / "manifests" / f"{step}.sha256").read_text()
        assert hashlib.sha256(text.encode()).hexdigest() == identity["manifests"][step], step
        for line in text.splitlines():
            digest, path = line.split("  ", 1)
            entries[path] = digest
    return entries


@pytest.fixture(scope="session")
def substituted():
    """Places below /opt/horizon that the run says something else is mounted over; none outside the GPU tier."""
    if VARIABLE not in os.environ:
        return ()
    run = json.loads(RunDirectory(Path(os.environ[VARIABLE])).run.read_text())
    return tuple(str(HOME / place) for place in run["image"]["substituted_libraries"])


def inside(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def sha256_of(path: str) -> str | None:
    """As images/install.py computes it: of a link, the digest of "-> " and its target."""
    try:
        if os.path.islink(path):
            return hashlib.sha256(f"-> {os.readlink(path)}".encode()).hexdigest()
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def test_every_file_is_the_one_that_was_built(manifest, substituted, record_property):
    own = [path for path in manifest if not inside(path, substituted)]
    record_property("files_substituted", len(manifest) - len(own))
    # The other layers have passed this below another artifact; a qualification with a checkpoint takes no word for it.
    if os.environ.get(TIER) == "artifact" and VARIABLE not in os.environ:
        own = [line.split("  ", 1)[1] for line in (HOME / "manifests/artifact.sha256").read_text().splitlines()]
    record_property("files", len(own))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(own, pool.map(sha256_of, own), strict=True))
    assert [path for path in own if found[path] != manifest[path]] == []


def test_no_file_beside_them(manifest, identity, substituted):
    present = {
        os.path.join(folder, name)
        for folder, folders, files in os.walk(HOME)
        for names in [[*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]]
        for name in names
    }
    ours = {str(HOME / f"manifests/{step}.sha256") for step in identity["manifests"]} | {str(HOME / "identity.json")}
    surplus = present - manifest.keys() - ours
    assert sorted(path for path in surplus if not inside(path, substituted)) == []


def test_installed_packages_are_the_locked_wheels(identity):
    def normal(name):
        return name.lower().replace("_", "-").replace(".", "-")

    locked = {(normal(name), version) for name, version in (wheel.split("-")[:2] for wheel in identity["wheels"])}
    installed = {(normal(d.metadata["Name"]), d.version) for d in metadata.distributions(path=[str(SITE)])}
    assert installed == locked


def test_the_patch_series_is_applied(identity):
    done = subprocess.run(
        [sys.executable, "-B", str(HOME / "patches/series.py"), "check", "--tree", str(SITE), "--json"],
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["state"], found["digest"]) == (0, "applied", identity["series_sha256"]), found


def test_the_image_is_the_one_that_was_staged(identity):
    """`make image` says what it staged; a container that is checked without it has nothing to compare."""
    staged = os.environ.get("HORIZON_SOURCE")
    assert staged in (None, identity["source_sha256"])


def test_runs_as_the_unprivileged_user(host):
    assert (os.getuid(), os.getgid()) == (10001, 0)
    assert host.user("horizon").home == "/var/cache/horizon"


def test_nothing_of_ours_is_writable(host):
    """By mode, not by trial: the root file system may be mounted read-only."""
    writable = r"find %s ! -type l \( -perm -002 -o -perm -020 -o ! -user root \)"
    assert host.run(writable, str(HOME)).stdout == ""


def test_hub_is_offline():
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_cuda_home_compiles_and_links(host, tmp_path):
    """What the engine's run-time compilation needs: nvcc, a C++ compiler, headers, plain library names."""
    source, library = tmp_path / "probe.cu", tmp_path / "probe.so"
    source.write_text(
        "#include <cuda.h>\n#include <cuda_runtime.h>\n#include <cuda_fp8.h>\n#include <vector>\n"
        "__global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n"
        'extern "C" int probe(float *x) { twice<<<1, 32>>>(x); int v; cuDriverGetVersion(&v);'
        " std::vector<int> w(1, v); return w[0] + cudaGetLastError(); }\n"
    )
    arches = ("90a", "120a")
    codes = " ".join(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in arches)
    options = "-std=c++17 -shared -Xcompiler -fPIC -L$CUDA_HOME/lib64 -lcuda -lcudart"
    built = host.run(f"nvcc --threads 2 {codes} {source} -o {library} {options}")
    assert built.rc == 0, built.stderr
    # The toolkit wheels have no cuobjdump; Triton brings one.
    listing = host.run(f"{SITE}/triton/backends/nvidia/bin/cuobjdump --list-elf {library}")
    assert all(f"sm_{arch}" in listing.stdout for arch in arches), listing.stdout + listing.stderr


def test_python_headers_and_ninja(host, tmp_path):
    source = tmp_path / "probe.c"
    source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
    include = host.run("python3 -c \"import sysconfig; print(sysconfig.get_path('include'))\"").stdout.strip()
    assert host.run(f"gcc -shared -fPIC -I{include} {source} -o {tmp_path}/probe.so").rc == 0
    assert host.run("ninja --version").rc == 0
