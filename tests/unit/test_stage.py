"""images/stage.py on small checkouts: which files are staged, and what the identity depends on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from images import stage
from images.wheels import Wheel
from qualify.errors import Rejected

ROOT = Path(__file__).resolve().parents[2]
IMAGE_TOML = """
source_date_epoch = 1700000000
build_tools = ["uv"]
[[layers]]
name = "cuda"
wheels = ["nvidia-*"]
[[layers]]
name = "python"
wheels = ["*"]
but = ["sglang"]
[[layers]]
name = "sglang"
wheels = ["sglang"]
[[exclude]]
layer = "python"
path = "requests/tests"
reason = "a test"
"""
# Stands for the real tool, which has tests of its own: it refuses a series with a file `broken`.
SERIES = """
import hashlib, pathlib, sys
here = pathlib.Path(__file__).parent / "sglang"
if sys.argv[1] == "check" and (not pathlib.Path(sys.argv[3]).exists() or (here / "broken").exists()):
    sys.exit("rejected: 0001-gate.patch: hunk 2 does not apply")
print(hashlib.sha256(b"".join(p.read_bytes() for p in sorted(here.rglob("*")) if p.is_file())).hexdigest())
"""
FILES = {
    "README.md": "# A project\n",
    "Makefile": "help:\n",
    "docs/page.md": "a page\n",
    "tests/unit/test_x.py": "def test_x(): pass\n",
    "benchmarks/run.py": "print()\n",
    "evidence/receipt.json": "{}\n",
    "images/Dockerfile": "FROM scratch\n",
    "images/image.toml": IMAGE_TOML,
    "images/install.py": "print('install')\n",
    "images/base.lock": "alpha 1.0 amd64 ab\n",
    "images/engine.in": "sglang\n",
    "patches/README.md": "# Patches\n",
    "patches/series.py": SERIES,
    "patches/series_diff.py": "A = 1\n",
    "patches/sglang/series": "0001-gate.patch\n",
    "patches/sglang/0001-gate.patch": "a patch\n",
    "patches/sglang/upstream.toml": "version = 1\n",
    "patches/sglang/files/sglang/srt/new.py": "NEW = 1\n",
    "recipes/mini.toml": 'artifact = "mini"\nimage = true\n',
    "recipes/mini.sh": "#!/bin/sh\n",
    "recipes/lib.sh": "true\n",
    "recipes/other.toml": 'artifact = "other"\nimage = true\n',
    "recipes/planned.toml": 'artifact = "planned"\n',
    "qualify/__init__.py": "",
    "qualify/cli.py": "CLI = 1\n",
    "qualify/checks/test_identity.py": "def test_identity(): pass\n",
    "qualify/models/published/config.json": "{}\n",
}
EXECUTABLE = {"recipes/mini.sh", "patches/series.py", "images/install.py"}
# Leavings of every kind; none of them may reach the image.
LEAVINGS = [
    "patches/__pycache__/series.cpython-311.pyc",
    "patches/sglang/files/sglang/srt/__pycache__/new.cpython-311.pyc",
    "patches/sglang/.0001-gate.patch.swp",
    "patches/sglang/0001-gate.patch.orig",
    "patches/sglang/0001-gate.patch.rej",
    "patches/sglang/0001-gate.patch~",
    "qualify/.mypy_cache/3.11/cache.json",
    "qualify/.ruff_cache/0.1/1",
    "qualify/__pycache__/cli.cpython-311.pyc",
    "qualify/__pycache__/cli.cpython-311.pyc.140234",
    "qualify/cli.py~",
    "qualify/.cli.py.swp",
    "recipes/.mini.toml.swp",
    "recipes/mini.toml~",
    "recipes/mini.toml.orig",
]
WHEELS = {"nvidia-x": "cuda", "requests": "python", "torch": "python", "sglang": "sglang", "uv": None}


def filename(name: str) -> str:
    return f"{name.replace('-', '_')}-1.0-py3-none-any.whl"


def checkout(root: Path, mode: int = 0o644, mtime: int = 1_600_000_000) -> Path:
    """A checkout of FILES, as git writes it under some umask and at some time."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lock = 'lock-version = "1.0"\n'
    for name in WHEELS:
        data = f"wheel {name}".encode()
        lock += f'[[packages]]\nname = "{name}"\nversion = "1.0"\nwheels = [{{ url = "https://e.org/{filename(name)}", '
        lock += f'size = {len(data)}, hashes = {{ sha256 = "{hashlib.sha256(data).hexdigest()}" }} }}]\n'
    (root / "images/engine.lock").write_text(lock)
    for name in ("images/cache.py", "images/stage.py", "images/wheels.py", "qualify/errors.py"):
        shutil.copyfile(ROOT / name, root / name)
    for path in sorted(root.rglob("*"), reverse=True):
        executable = path.is_dir() or str(path.relative_to(root)) in EXECUTABLE
        path.chmod(mode | (mode & 0o444) >> 2 if executable else mode)
        os.utime(path, (mtime, mtime))
    return root


def make_cache(cache: Path, mode: int = 0o644) -> Path:
    """A cache with the wheels and a base."""
    (cache / "wheels").mkdir(parents=True)
    (cache / "base/key").mkdir(parents=True)
    for name in WHEELS:
        (cache / "wheels" / filename(name)).write_bytes(f"wheel {name}".encode())
        (cache / "wheels" / filename(name)).chmod(mode)
    for name, text in {"rootfs.tar": "root", "rootfs.sha256": "abcd\n", "drift.txt": ""}.items():
        (cache / "base/key" / name).write_text(text)
        (cache / "base/key" / name).chmod(mode)
    return cache


def run_stage(root: Path, cache: Path, umask: int = 0o022, image: str = "") -> tuple[int, dict, str]:
    """Stage the artifact `mini` of a checkout by its own code; exit code, identity, stderr."""
    code = (
        "import json, sys; from pathlib import Path\n"
        "from images.stage import stage; from qualify.errors import exit_code\n"
        f"base = {{'image': {image!r}}} if {image!r} else {{'rootfs': Path({str(cache / 'base/key')!r})}}\n"
        f"sys.exit(exit_code(lambda: print(json.dumps(stage('mini', Path({str(cache)!r}), base)[1])) or 0))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=root, umask=umask, capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def identity_of(root: Path, cache: Path, **options) -> dict:
    code, identity, error = run_stage(root, cache, **options)
    assert code == 0, error
    return identity


def listing(folder: Path) -> dict[str, str]:
    """Path -> mode and content of everything in a staged tree."""
    entries = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.stat()
        content = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        entries[str(path.relative_to(folder))] = f"{status.st_mode:o} {content}"
    return entries


@pytest.fixture
def mini(tmp_path) -> tuple[Path, Path]:
    """A checkout and a cache."""
    return checkout(tmp_path / "checkout"), make_cache(tmp_path / "cache")


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> tuple[dict, dict]:
    """Identity and staged tree of an unchanged checkout."""
    folder = tmp_path_factory.mktemp("unchanged")
    cache = make_cache(folder / "cache")
    return identity_of(checkout(folder / "checkout"), cache), listing(cache / "stage/mini")


# What is staged


def test_exactly_the_files_of_the_image_are_staged(mini):
    root, cache = mini
    for name in LEAVINGS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left behind")
    identity_of(root, cache)
    staged = cache / "stage/mini"
    expected = {"Dockerfile", "build/install.py", f"build/{filename('uv')}", "base/rootfs.tar"}
    expected |= {f"wheels/{layer}/{filename(name)}" for name, layer in WHEELS.items() if layer}
    expected |= {
        f"wheels/{layer}/{name}"
        for layer in ("cuda", "python", "sglang")
        for name in ("requirements.txt", "exclude.json")
    }
    expected |= {name for name in FILES if name.startswith("patches/") and name != "patches/README.md"}
    expected |= {
        f"artifact/{name}"
        for name in [*FILES, "qualify/errors.py"]
        if name.startswith(("qualify/", "recipes/")) and name not in ("recipes/other.toml", "recipes/planned.toml")
    }
    expected |= {"artifact/images/engine.lock", "artifact/images/base.lock", "artifact/identity.json"}
    assert {str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file()} == expected


def test_each_layer_has_its_wheels_and_its_exclusions(mini):
    root, cache = mini
    identity_of(root, cache)
    layers = cache / "stage/mini/wheels"
    assert (layers / "cuda/requirements.txt").read_text() == "nvidia-x==1.0\n"
    assert (layers / "python/requirements.txt").read_text() == "requests==1.0\ntorch==1.0\n"
    assert (layers / "sglang/requirements.txt").read_text() == "sglang==1.0\n"
    assert [json.loads((layers / layer / "exclude.json").read_text()) for layer in ("cuda", "python", "sglang")] == [
        [],
        ["requests/tests"],
        [],
    ]


def test_files_have_normal_modes(mini):
    root, cache = mini
    identity_of(root, cache)
    staged = cache / "stage/mini"
    assert (staged / "artifact/recipes/mini.sh").stat().st_mode & 0o7777 == 0o755
    assert (staged / "artifact/recipes/lib.sh").stat().st_mode & 0o7777 == 0o644
    for path in [staged, *staged.rglob("*")]:
        if path.is_dir():
            assert path.stat().st_mode & 0o7777 == 0o755, path


def test_an_edit_of_equal_length_gets_another_time(mini):
    """BuildKit reads a context file again only when its size or time differs from the last build's."""
    root, cache = mini
    staged = cache / "stage/mini/artifact/qualify/cli.py"
    identity_of(root, cache)
    before = staged.stat()
    replace("qualify/cli.py", "1", "2")(root, cache)
    identity_of(root, cache)
    assert staged.stat().st_size == before.st_size
    assert staged.stat().st_mtime_ns != before.st_mtime_ns


def test_wheels_and_base_are_linked_not_copied(mini):
    root, cache = mini
    identity_of(root, cache)
    staged = cache / "stage/mini"
    assert (staged / "wheels/cuda" / filename("nvidia-x")).samefile(cache / "wheels" / filename("nvidia-x"))
    assert (staged / "base/rootfs.tar").samefile(cache / "base/key/rootfs.tar")


def test_the_identity_says_what_the_image_is_made_of(mini):
    root, cache = mini
    identity = identity_of(root, cache)
    assert json.loads((cache / "stage/mini/artifact/identity.json").read_text()) == identity
    sha256 = {name: hashlib.sha256(f"wheel {name}".encode()).hexdigest() for name in WHEELS}
    assert identity["artifact"] == "mini"
    assert identity["engine"] == {"name": "sglang", "version": "1.0", "wheel_sha256": sha256["sglang"]}
    assert identity["wheels"] == {filename(name): sha256[name] for name in WHEELS if name != "uv"}
    lock = hashlib.sha256((root / "images/base.lock").read_bytes()).hexdigest()
    assert identity["base"] == {"rootfs_sha256": "abcd", "lock_sha256": lock, "drift": []}
    assert identity["source_date_epoch"] == 1_700_000_000
    assert identity["excluded"] == ["requests/tests"]


def test_another_base_image(mini):
    root, cache = mini
    reference = f"example.org/base@sha256:{'0' * 64}"
    identity = identity_of(root, cache, image=reference)
    assert identity["base"] == {"image": reference}
    assert list((cache / "stage/mini/base").iterdir()) == []


# What the identity depends on


def test_two_checkouts_give_the_same_tree_and_identity(tmp_path):
    """Other times, other modes and umasks, another path and another cache."""
    first = identity_of(checkout(tmp_path / "a"), make_cache(tmp_path / "one"))
    root = checkout(tmp_path / "elsewhere/b", mode=0o600, mtime=1_650_000_000)
    second = identity_of(root, make_cache(tmp_path / "two", mode=0o600), umask=0o077)
    third = identity_of(checkout(tmp_path / "c", mode=0o664), make_cache(tmp_path / "three", mode=0o664), umask=0o002)
    assert first == second == third
    trees = [listing(tmp_path / cache / "stage/mini") for cache in ("one", "two", "three")]
    assert trees[0] == trees[1] == trees[2]


def test_staging_again_gives_the_same(mini):
    root, cache = mini
    first = identity_of(root, cache), listing(cache / "stage/mini")
    assert (identity_of(root, cache), listing(cache / "stage/mini")) == first
    assert [path.name for path in (cache / "stage").iterdir()] == ["mini"]


@pytest.mark.parametrize(
    "name",
    [
        "README.md", "Makefile", "docs/page.md", "docs/new.md", "tests/unit/test_x.py", "benchmarks/run.py",
        "evidence/receipt.json", "patches/README.md", "recipes/other.toml", "images/engine.in", "images/build.py",
    ],
)  # fmt: skip
def test_the_identity_does_not_depend_on(mini, unchanged, name):
    root, cache = mini
    (root / name).write_text("changed\n")
    assert (identity_of(root, cache), listing(cache / "stage/mini")) == unchanged


def replace(name: str, old: str, new: str):
    def change(root: Path, cache: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        replace("patches/sglang/0001-gate.patch", "patch", "other"),
        replace("patches/sglang/files/sglang/srt/new.py", "1", "2"),
        replace("patches/sglang/upstream.toml", "1", "2"),
        replace("patches/series_diff.py", "1", "2"),
        replace("recipes/mini.toml", "\n", "\n\n"),
        replace("recipes/mini.sh", "sh", "bash"),
        replace("recipes/lib.sh", "true", "false"),
        replace("qualify/cli.py", "1", "2"),
        replace("qualify/checks/test_identity.py", "pass", "assert 1"),
        replace("qualify/models/published/config.json", "{}", "[]"),
        replace("images/engine.lock", 'lock-version = "1.0"', 'lock-version = "1.0" # renewed'),
        replace("images/base.lock", "1.0", "1.1"),
        replace("images/Dockerfile", "FROM scratch", "FROM scratch AS x"),
        replace("images/install.py", "install", "installer"),
        replace("images/image.toml", "1700000000", "1700000001"),
        replace("images/image.toml", "requests/tests", "requests/*/tests"),
        replace("images/image.toml", 'layer = "python"', 'layer = "cuda"'),
        replace("images/image.toml", '"nvidia-*"', '"nvidia-*", "torch"'),
        lambda root, cache: (root / "recipes/lib.sh").chmod(0o755),
        lambda root, cache: (root / "qualify/new.py").write_text(""),
        lambda root, cache: (root / "qualify/cli.py").rename(root / "qualify/main.py"),
        lambda root, cache: (cache / "base/key/rootfs.sha256").write_text("other\n"),
        lambda root, cache: (cache / "base/key/drift.txt").write_text("alpha: 1 -> 2\n"),
    ],
    ids=[
        "patch", "new-module", "upstream", "series-tool", "recipe", "recipe-script", "library", "qualify", "check",
        "published", "engine-lock", "base-lock", "Dockerfile", "install", "epoch", "exclude", "exclude-layer", "layers",
        "mode", "new-file", "renamed", "rootfs", "drift",
    ],
)  # fmt: skip
def test_the_identity_depends_on(mini, unchanged, change):
    change(*mini)
    assert identity_of(*mini)["source_sha256"] != unchanged[0]["source_sha256"]


# Failures


def check_failure(mini, code: int, *words: str) -> None:
    """The staging fails with one sentence, leaves no half-made tree, and keeps the tree of an earlier run."""
    root, cache = mini
    got, _, error = run_stage(root, cache)
    assert got == code, error
    assert error.count("\n") == 1, error
    assert [word for word in words if word not in error] == [], error
    assert [path.name for path in (cache / "stage").iterdir()] == ["mini"]
    assert (cache / "stage/mini/earlier").exists()


@pytest.fixture
def earlier(mini) -> tuple[Path, Path]:
    """A checkout whose cache holds the tree of an earlier run."""
    (mini[1] / "stage/mini").mkdir(parents=True)
    (mini[1] / "stage/mini/earlier").write_text("")
    return mini


def test_a_wheel_without_a_layer(earlier):
    replace("images/image.toml", 'wheels = ["sglang"]', 'wheels = ["sglong"]')(*earlier)
    check_failure(earlier, 1, "rejected: images/image.toml", "no layer takes the wheel", filename("sglang"))


def test_an_exclusion_from_an_unknown_layer(earlier):
    replace("images/image.toml", 'layer = "python"', 'layer = "pyton"')(*earlier)
    check_failure(earlier, 1, "rejected: images/image.toml", "requests/tests", "pyton")


def test_a_series_that_does_not_apply(earlier):
    (earlier[0] / "patches/sglang/broken").write_text("")
    check_failure(earlier, 1, "rejected: patch series: 0001-gate.patch: hunk 2 does not apply")


def test_a_wheel_missing_from_the_cache(earlier):
    (earlier[1] / "wheels" / filename("torch")).unlink()
    check_failure(earlier, 2, "cannot run: staging the build context failed", filename("torch"))


def test_a_missing_source(earlier):
    (earlier[0] / "images/Dockerfile").unlink()
    check_failure(earlier, 2, "cannot run: staging the build context failed", "images/Dockerfile")


def test_artifacts_are_the_recipes(mini, monkeypatch):
    monkeypatch.setattr(stage, "ROOT", mini[0])
    assert stage.artifacts() == ["mini", "other"]


# This checkout


@pytest.fixture(scope="module")
def staged(tmp_path_factory) -> dict[str, Path]:
    """The staged tree of every artifact of this checkout; wheels are empty files, and the series is not checked."""
    cache = make_cache(tmp_path_factory.mktemp("cache") / "cache")
    for locked in stage.read_lock():
        (cache / "wheels" / locked.filename).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "series", lambda *_: "0" * 64)
        base = {"image": f"example.org/base@sha256:{'0' * 64}"}
        return {artifact: stage.stage(artifact, cache, base)[0] for artifact in stage.artifacts()}


def test_artifacts_differ_in_their_last_layer_alone(staged):
    assert staged.keys() >= {"k2-horizon-fp8", "mova-fp8"}
    shared = [{p: v for p, v in listing(folder).items() if not p.startswith("artifact")} for folder in staged.values()]
    assert all(tree == shared[0] for tree in shared)
    for artifact, folder in staged.items():
        recipes = {path.name for path in (folder / "artifact/recipes").iterdir()}
        assert recipes == {f"{artifact}.toml", f"{artifact}.sh", "lib.sh"}


def test_a_staged_recipe_prints_what_the_checkout_prints(staged):
    for artifact, folder in staged.items():
        lines = [
            subprocess.run(
                [where / f"recipes/{artifact}.sh", "--print"], env={"PATH": os.environ["PATH"]}, cwd="/",
                capture_output=True, text=True, check=True,
            ).stdout
            for where in (ROOT, folder / "artifact")
        ]  # fmt: skip
        assert lines[0] == lines[1] != ""


# Layers


def wheel(name: str) -> Wheel:
    return Wheel(name, "1", f"{name}.whl", "", 1, "")


def test_assign_takes_the_first_layer_that_matches():
    layers = [
        {"name": "a", "wheels": ["x-*", "y"]},
        {"name": "b", "wheels": ["*"], "but": ["z"]},
        {"name": "c", "wheels": ["z"]},
    ]
    placed = stage.assign([wheel(name) for name in ("z", "y", "x-1", "x", "yy")], layers)
    assert {layer: [w.name for w in wheels] for layer, wheels in placed.items()} == {
        "a": ["y", "x-1"],
        "b": ["x", "yy"],
        "c": ["z"],
    }


def test_assign_without_a_layer():
    with pytest.raises(Rejected, match=r"no layer takes the wheel z\.whl"):
        stage.assign([wheel("z")], [{"name": "b", "wheels": ["*"], "but": ["z"]}])


def test_every_locked_wheel_has_a_layer_and_every_layer_a_wheel():
    image = tomllib.loads((ROOT / "images/image.toml").read_text())
    placed = stage.assign([w for w in stage.read_lock() if w.name not in image["build_tools"]], image["layers"])
    assert all(placed.values())
    assert [w.name for w in placed["sglang"]] == ["sglang"]
    assert [w.name for w in placed["torch"]] == ["torch", "triton"]
    assert {rule["layer"] for rule in image["exclude"]} <= placed.keys()
