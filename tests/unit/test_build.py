"""images/build.py with a recording docker client: an image is tagged after it passed its check, and only then."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from images import build
from images.docker import Docker
from qualify.errors import CannotRun, Rejected, exit_code

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 1_700_000_000
IMAGE = f"sha256:{'1' * 64}"
PREVIOUS = f"sha256:{'0' * 64}"
IDENTITY = {
    "artifact": "mova-fp8",
    "engine": {"name": "sglang", "version": "0.5.23", "wheel_sha256": "e" * 64},
    "base": {"rootfs_sha256": "b" * 64, "lock_sha256": "c" * 64, "drift": []},
    "series_sha256": "d" * 64,
    "source_date_epoch": EPOCH,
    "source_sha256": "f" * 64,
    "wheels": {},
}
# A client with one tag; what its build prints and how its build and run end lies in files beside it.
CLIENT = f"""
here=$(dirname "$0")
case "$1 $2" in
  "buildx build")
    for a; do case $a in --iidfile=*) iid=${{a#*=}};; esac; done
    [ -n "${{iid-}}" ] || exit 0  # the probe
    [ ! -e "$here/while-building" ] || . "$here/while-building"
    cat "$here/says"
    code=$(cat "$here/build-exit"); [ "$code" = 0 ] || exit "$code"
    printf {IMAGE} >"$iid";;
  run*) [ ! -e "$here/while-running" ] || . "$here/while-running"; exit "$(cat "$here/run-exit")";;
  tag*) printf "%s %s" "$3" "$2" >"$here/tag";;
  "image inspect") cat "$here/inspect";;
esac
"""


@pytest.fixture
def machine(commands, tmp_path, monkeypatch):
    """A machine with that client, where everything is fetched and staged already."""
    for name in ("BASE_IMAGE", "STRICT"):
        monkeypatch.delenv(name, raising=False)
    fakes = commands()
    monkeypatch.setenv("DOCKER", str(fakes.add("docker", CLIENT)))
    tag = fakes.folder / "tag"
    tag.write_text(f"horizon-images/mova-fp8:candidate {PREVIOUS}")
    (tmp_path / "context/artifact/qualify").mkdir(parents=True)
    layers = {"Size": 8_700_000_000, "RootFS": {"Layers": ["sha256:base", "sha256:engine", "sha256:artifact"]}}
    state = {"inspect": json.dumps([layers]), "says": "#1 done\n", "build-exit": "0", "run-exit": "0"}
    for name, text in state.items():
        (fakes.folder / name).write_text(text)
    prepared = []

    def prepare(artifact: str, cache: Path) -> tuple[Path, dict]:
        prepared.append(artifact)
        return tmp_path / "context", IDENTITY

    monkeypatch.setattr(build, "prepare", prepare)
    monkeypatch.setattr(build, "artifacts", lambda: ["mova-fp8", "other"])
    return SimpleNamespace(
        fakes=fakes,
        cache=tmp_path / "cache",
        prepared=prepared,
        set=lambda name, text: (fakes.folder / name).write_text(text),
        tagged=lambda: tag.read_text().split()[1],
        build=lambda artifact="mova-fp8": exit_code(lambda: build.build(artifact, tmp_path / "cache") or 0),
    )


def sentence(capsys) -> str:
    """The refusal: exactly one line."""
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("rejected: ", "cannot run: "))]
    assert len(said) == 1
    return said[0]


# Build, check, tag


def test_an_image_that_passed_is_tagged(machine, capsys):
    assert machine.build() == 0
    assert machine.tagged() == IMAGE
    assert f"horizon-images/mova-fp8:candidate is {IMAGE}, 8.70 GB" in capsys.readouterr().out
    verbs = [call.split()[1] for call in machine.fakes.calls("docker")]
    assert verbs == ["buildx", "buildx", "image", "run", "rm", "tag", "image"]  # the first is the probe


def test_the_build_has_no_network_and_no_tag(machine):
    machine.build()
    call = machine.fakes.calls("docker")[1]
    assert call.startswith("docker buildx build --load --provenance=false --network=none ")
    assert f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}" in call
    assert f"--label=org.opencontainers.image.revision={'f' * 64}" in call
    assert "--tag" not in call
    assert " -t " not in call
    assert "--build-arg=BASE=" not in call
    assert call.endswith("/context")


def test_the_check_runs_locked_down(machine):
    machine.build()
    words = machine.fakes.calls("docker")[3].split()
    assert {"--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"} <= set(words)
    assert f"--env=HORIZON_SOURCE={'f' * 64}" in words
    assert words[words.index(IMAGE) :] == [IMAGE, "python3", "-m", "qualify", "run", "--tier", "cpu"]


def tiers(machine) -> list[str]:
    """That each check so far was of."""
    return [call.split()[-1] for call in machine.fakes.calls("docker") if call.startswith("docker run ")]


def another(machine, last: str = "sha256:other", engine: str = "sha256:engine") -> None:
    """The next build makes another image."""
    machine.set("inspect", json.dumps([{"Size": 1, "RootFS": {"Layers": ["sha256:base", engine, last]}}]))
    client = machine.fakes.folder / "docker"
    client.write_text(client.read_text().replace(IMAGE, f"sha256:{'2' * 64}"))


def test_layers_that_passed_below_another_artifact_are_not_checked_again(machine, capsys):
    machine.build()
    another(machine)
    machine.build("other")
    assert tiers(machine) == ["cpu", "artifact"]
    assert f"have passed the CPU tier, in {IMAGE}" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["same-image", "layers", "checks", "failed"])
def test_everything_else_is_checked_whole(machine, tmp_path, change):
    machine.set("run-exit", "1" if change == "failed" else "0")
    machine.build()
    machine.set("run-exit", "0")
    if change != "same-image":
        another(machine, engine="sha256:patched" if change == "layers" else "sha256:engine")
    if change == "checks":
        (tmp_path / "context/artifact/qualify/check.py").write_text("")
    machine.build()
    assert tiers(machine) == ["cpu", "cpu"]


def test_an_image_whose_own_layer_failed_vouches_for_nothing_and_is_not_tagged(machine):
    machine.build()
    another(machine)
    machine.set("run-exit", "1")
    assert machine.build("other") == 1
    assert tiers(machine) == ["cpu", "artifact"]
    assert machine.tagged() == IMAGE


def test_the_container_of_the_check_is_removed_even_when_the_client_is_killed(machine):
    machine.build()
    run, rm = machine.fakes.calls("docker")[3:5]
    name = next(word for word in run.split() if word.startswith("--name=")).removeprefix("--name=")
    assert rm == f"docker rm --force {name}"


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_an_unclear_strict_is_refused(machine, monkeypatch, capsys, value):
    monkeypatch.setenv("STRICT", value)
    assert machine.build() == 1
    assert f"STRICT={value}" in sentence(capsys)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("#9 ERROR: step failed\nerror: exit code 1\n\n", "docker build failed: error: exit code 1"),
        (
            "#9 1.0 rejected: 0001-a.patch: no such line\nerror: exit code 1\n",
            "docker build failed: 0001-a.patch: no such",
        ),
        ("", "docker build failed: no message"),
    ],
    ids=["last-line", "own-sentence", "silent"],
)
def test_a_failing_build_tags_nothing(machine, capsys, says, reason):
    machine.set("says", says)
    machine.set("build-exit", "17")
    assert machine.build() == 2
    assert sentence(capsys).startswith(f"cannot run: {reason}")
    assert machine.tagged() == PREVIOUS
    assert not [call for call in machine.fakes.calls() if call.split()[1] in ("run", "tag")]


@pytest.mark.parametrize("words", ["write /x: no space left on device", "OSError: [Errno 28] No space left on device"])
def test_a_full_disk_is_told_as_such(machine, capsys, words):
    machine.set("says", f"#9 {words}\nerror: failed to solve\n")
    machine.set("build-exit", "1")
    assert machine.build() == 2
    assert sentence(capsys) == (
        "cannot run: disk full while building: free about 25 GB where Docker keeps its data, then run again"
    )
    assert machine.tagged() == PREVIOUS


def test_the_output_of_the_build_is_shown(machine, capsys):
    machine.set("says", "".join(f"#{n} a step\n" for n in range(100)))
    machine.build()
    assert capsys.readouterr().err.count(" a step\n") == 100


@pytest.mark.parametrize(
    ("code", "exit_with", "reason"),
    [
        (1, 1, "rejected: the image failed its check in the container (above, exit 1); nothing was tagged"),
        (2, 1, "rejected: the image failed its check in the container (above, exit 2); nothing was tagged"),
        (137, 1, "rejected: the image failed its check in the container (above, exit 137); nothing was tagged"),
        (125, 2, "cannot run: the container for the check did not start (above); nothing was tagged"),
    ],
)
def test_a_failing_check_leaves_the_previous_tag(machine, capsys, code, exit_with, reason):
    machine.set("run-exit", str(code))
    assert machine.build() == exit_with
    assert sentence(capsys) == reason
    assert machine.tagged() == PREVIOUS


def test_a_failing_tag_is_told(machine, capsys):
    machine.fakes.add("docker", CLIENT.replace("tag*)", "tag*) echo read-only >&2; exit 1;;\n  tug*)"))
    assert machine.build() == 2
    assert sentence(capsys) == "cannot run: `docker tag` failed: read-only"
    assert machine.tagged() == PREVIOUS


def test_a_clock_before_the_epoch(machine, capsys, monkeypatch):
    """Files would keep times after the epoch and the layers would differ each time."""
    monkeypatch.setattr(build, "time", SimpleNamespace(time=lambda: EPOCH - 1, monotonic=lambda: 0.0))
    assert machine.build() == 2
    assert "clock is before the image's SOURCE_DATE_EPOCH" in sentence(capsys)
    assert machine.tagged() == PREVIOUS
    assert len(machine.fakes.calls()) == 1  # the probe


# What is refused before anything is fetched


def test_an_unknown_artifact_lists_the_known(machine, capsys):
    assert machine.build("mova-fp9") == 1
    assert sentence(capsys) == "rejected: ARTIFACT=mova-fp9: unknown; there are mova-fp8, other (recipes/*.toml)"
    assert (machine.prepared, machine.fakes.calls()) == ([], [])


@pytest.mark.parametrize(
    "reference",
    [
        "debian", "debian:bookworm", f"@sha256:{'0' * 64}", f"debian@sha256:{'0' * 63}", f"debian@sha256:{'0' * 65}",
        f"debian@sha256:{'G' * 64}", f"debian@sha512:{'0' * 64}", f"a b@sha256:{'0' * 64}", f"a@b@sha256:{'0' * 64}",
    ],
)  # fmt: skip
def test_a_base_image_without_digest(machine, capsys, monkeypatch, reference):
    monkeypatch.setenv("BASE_IMAGE", reference)
    assert machine.build() == 1
    assert sentence(capsys) == f"rejected: BASE_IMAGE={reference}: give it by digest, name@sha256:<64 hex digits>"
    assert (machine.prepared, machine.fakes.calls()) == ([], [])


@pytest.mark.parametrize("name", ["debian", "example.org:5000/team/base", "debian:bookworm"])
def test_a_base_image_by_digest(monkeypatch, name):
    monkeypatch.setenv("BASE_IMAGE", f"{name}@sha256:{'0' * 64}")
    assert build.base_image() == f"{name}@sha256:{'0' * 64}"


@pytest.mark.parametrize("value", [None, ""])
def test_no_base_image(monkeypatch, value):
    monkeypatch.delenv("BASE_IMAGE", raising=False)
    if value is not None:
        monkeypatch.setenv("BASE_IMAGE", value)  # as `make` exports an unset variable
    assert not build.base_image()


def test_no_client(machine, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER", str(tmp_path / "none"))
    assert machine.build() == 2
    assert "no docker client here can build" in sentence(capsys)
    assert machine.prepared == []


# prepare


@pytest.fixture
def steps(monkeypatch):
    """The steps of prepare, recorded."""
    seen = []
    monkeypatch.setattr(build.wheels, "read_lock", lambda: ["a wheel"])
    monkeypatch.setattr(build.wheels, "fetch", lambda wheels, folder: seen.append(("fetch", wheels, folder)))
    monkeypatch.setattr(build.base, "build", lambda cache, strict: seen.append(("base", strict)) or Path("rootfs"))
    monkeypatch.setattr(build, "stage", lambda *arguments: seen.append(("stage", *arguments)) or (Path("x"), IDENTITY))
    for name in ("BASE_IMAGE", "STRICT"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize(("value", "strict"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_prepare_fetches_bootstraps_and_stages(steps, monkeypatch, value, strict):
    if value is not None:
        monkeypatch.setenv("STRICT", value)
    assert build.prepare("mova-fp8", Path("/cache")) == (Path("x"), IDENTITY)
    assert steps == [
        ("fetch", ["a wheel"], Path("/cache/wheels")),
        ("base", strict),
        ("stage", "mova-fp8", Path("/cache"), {"rootfs": Path("rootfs")}),
    ]


def test_prepare_with_a_base_image_bootstraps_nothing(steps, monkeypatch):
    reference = f"debian@sha256:{'0' * 64}"
    monkeypatch.setenv("BASE_IMAGE", reference)
    build.prepare("mova-fp8", Path("/cache"))
    assert [step[0] for step in steps] == ["fetch", "stage"]
    assert steps[1][-1] == {"image": reference}


def test_a_base_image_reaches_the_build(machine, monkeypatch, tmp_path):
    reference = f"debian@sha256:{'0' * 64}"
    identity = {**IDENTITY, "base": {"image": reference}}
    client = Docker(os.environ["DOCKER"], ["buildx", "build"])
    assert build.docker_build(client, tmp_path, identity) == IMAGE
    assert f"--build-arg=BASE={reference}" in machine.fakes.calls()[0]


# Labels


def test_labels_are_functions_of_the_identity(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    first = build.labels(IDENTITY)
    monkeypatch.setattr(build.time, "time", lambda: 0.0)
    assert build.labels(IDENTITY) == first
    assert first["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"
    assert first["org.opencontainers.image.version"] == f"0.5.23-{'f' * 12}"
    assert first["org.opencontainers.image.revision"] == "f" * 64
    assert first["org.opencontainers.image.title"] == "horizon-images/mova-fp8"
    assert first["org.opencontainers.image.base.digest"] == f"sha256:{'b' * 64}"
    assert first["io.horizon-images.engine.wheel"] == f"sha256:{'e' * 64}"
    assert first["io.horizon-images.series"] == f"sha256:{'d' * 64}"
    assert first["io.horizon-images.base.drift"] == "none"
    assert all(isinstance(value, str) and value and "\n" not in value for value in first.values())


def test_labels_record_the_drift():
    drifted = {**IDENTITY, "base": {**IDENTITY["base"], "drift": ["a: 1 -> 2", "b: not installed (1 all x)"]}}
    assert build.labels(drifted)["io.horizon-images.base.drift"] == "a: 1 -> 2; b: not installed (1 all x)"


def test_labels_name_the_base_image():
    digest = f"sha256:{hashlib.sha256(b'base').hexdigest()}"
    labels = build.labels({**IDENTITY, "base": {"image": f"example.org/base:1@{digest}"}})
    assert labels["org.opencontainers.image.base.name"] == "example.org/base:1"
    assert labels["org.opencontainers.image.base.digest"] == digest


# One build at a time


def test_the_lock_is_held_while_building_and_free_while_checking(machine):
    lock = f'flock --nonblock "{machine.cache}/lock" true && echo free >>"$here/lock" || echo held >>"$here/lock"'
    machine.set("while-building", lock)
    machine.set("while-running", lock)
    assert machine.build() == 0
    assert (machine.fakes.folder / "lock").read_text() == "held\nfree\n"


def test_a_second_build_waits(tmp_path):
    """It says so, and has the lock for itself once the first has let go."""
    code = (
        "import subprocess, sys; from pathlib import Path; from images import build\n"
        f"with build.exclusive(Path({str(tmp_path)!r})):\n"
        "    sys.stdin.readline()\n"
        f"    print(subprocess.run(['flock', '--nonblock', {str(tmp_path / 'lock')!r}, 'true']).returncode)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with build.exclusive(tmp_path):
        second = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
        assert second.stderr.readline() == f"waiting for another build that uses {tmp_path}\n"
    assert second.communicate("the first has let go\n") == ("1\n", "")


def test_a_failed_build_frees_the_lock(machine):
    machine.set("build-exit", "1")
    assert machine.build() == 2
    assert subprocess.run(["flock", "--nonblock", str(machine.cache / "lock"), "true"], check=False).returncode == 0


def test_what_a_killed_build_left_is_removed(tmp_path):
    kept = ["stage/mova-fp8", "base/0123456789abcdef", "wheels"]
    for name in [*kept, "stage/new.x1", "base/new.x2", "reproduce.x3"]:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("")
    with build.exclusive(tmp_path):
        pass
    left = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("file")}
    assert left == set(kept)


def test_a_cache_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"the cache .*/file/cache cannot be used: Not a directory; set HORIZON_CACHE"
    with pytest.raises(CannotRun, match=said), build.exclusive(tmp_path / "file/cache"):
        pass


def test_an_error_inside_is_not_taken_for_one_of_the_cache(tmp_path):
    with pytest.raises(Rejected), build.exclusive(tmp_path):
        raise Rejected("something else")


# The command


def command(machine, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    code = (
        "import sys; from pathlib import Path; from images import build; "
        f"build.prepare = lambda artifact, cache: (Path('context'), {IDENTITY!r}); "
        f"sys.argv = ['build.py', *{arguments!r}]; sys.exit(build.exit_code(build.main))"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_command(machine, tmp_path):
    done = command(machine, tmp_path, "mova-fp8", "--cache", str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert machine.tagged() == IMAGE


def test_a_killed_build_ends_its_client_and_tags_nothing(machine, tmp_path):
    ended = tmp_path / "ended"
    os.mkfifo(ended)
    machine.set(
        "while-building",
        f"trap 'echo ended >\"{ended}\"; exit' TERM; kill -TERM $PPID; for n in $(seq 200); do sleep 0.05; done\n"
        f'echo survived >"{ended}"; exit 1',
    )
    done = command(machine, tmp_path, "mova-fp8", "--cache", str(tmp_path / "cache"))
    assert ended.read_text() == "ended\n"
    assert done.returncode == 143
    assert machine.tagged() == PREVIOUS
