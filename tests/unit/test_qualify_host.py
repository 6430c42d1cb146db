"""``make qualify``: what is refused before anything starts, and with which words the engine is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "sha256:" + "a" * 64
#: A client with an engine, an image and GPUs by way of the option in $WAY.
DOCKER = f"""
case "$*" in
  "image inspect --format {{{{.Id}}}}"*) [ -z "${{NO_IMAGE:-}}" ] || exit 1; echo {IMAGE};;
  "image inspect --format"*) echo {"b" * 64};;
  "image inspect"*) echo '[{{"Id": "{IMAGE}"}}]';;
  "version"*) [ -z "${{NO_ENGINE:-}}" ] || exit 1; echo 27;;
  *"machine.query()"*) case "$*" in *"$WAY"*) ;; *) echo "could not select device driver" >&2; exit 125;; esac;;
  "run "*) [ -z "${{PASSES:-}}" ] || echo "{{}}" >"$PASSES/run.json"; exit "${{CODE:-0}}";;
esac
"""


@pytest.fixture
def host(tmp_path, commands):
    """Run the command with a recording client; ``model`` is a folder with a config."""
    fakes = commands()
    fakes.add("docker", DOCKER)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
        flags = [word for word in words if word == "--full"]
        words = [word for word in words if word != "--full"]
        given = dict(zip(words[::2], words[1::2], strict=True))
        given = {"--artifact": "mova-fp8", "--model-dir": str(model), "--target": "h200",
                 "--out": str(tmp_path / "out"), **given}  # fmt: skip
        dropped = ("DOCKER", "API_KEY_FILE")
        clean = {key: value for key, value in os.environ.items() if key not in dropped}
        return subprocess.run(
            [sys.executable, "-B", "-m", "qualify.host", *(word for pair in given.items() for word in pair), *flags],
            cwd=ROOT,
            env={**clean, "WAY": "--gpus=all", "DOCKER": str(fakes.folder / "docker"), **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.fakes, run.model, run.out = fakes, model, tmp_path / "out"
    return run


def the_run(host) -> str:
    [call] = [call for call in host.fakes.calls("docker") if "qualify run" in call]
    return call


def test_the_container(host):
    done = host(
        PASSES=str(host.out), ROUTER_PARTITIONS="2", MAX_RUNNING="8", UNCATALOGUED="1", TP="4", PORT="1", EMPTY=""
    )
    assert done.returncode == 0, done.stderr
    call = the_run(host)
    options, command = call.split(f" {IMAGE} ")
    for option in (
        "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--gpus=all",
        "--shm-size=16g", f"--volume={host.model}:/models:ro", f"--volume={host.out}:/out",
        "--volume=horizon-cache:/var/cache/horizon", "--tmpfs=/tmp:exec,mode=1777", "--env=ROUTER_PARTITIONS=2",
        "--env=MAX_RUNNING=8", "--env=UNCATALOGUED=1", f"--env=HORIZON_SOURCE={'b' * 64}",
    ):  # fmt: skip
        assert option in options.split(), option
    assert not any(word.startswith(("--env=TP", "--env=PORT")) for word in options.split())
    assert options.count("/var/cache/horizon") == 1
    assert command == (
        "python3 -m qualify run --tier gpu --artifact mova-fp8 --target h200 --tp 1 --ep 1 "
        "--model-dir /models --out /out"
    )
    assert host.fakes.calls("docker")[-2].startswith("docker rm --force horizon-qualify-")
    seen = host.out / "image-inspect.json"
    assert f"python3 -m qualify seal --run {host.out} --image-inspect {seen} --out RECEIPT" in done.stdout
    assert host.fakes.calls("docker")[-1] == f"docker image inspect {IMAGE}"
    assert json.loads(seen.read_text()) == [{"Id": IMAGE}]
    assert host.out.stat().st_mode & 0o070 == 0o070


def test_the_options_are_those_of_the_suite(host):
    """The command in the container is one that the suite's own parser takes."""
    from qualify import cli

    host()
    words = the_run(host).split(f" {IMAGE} ")[1].split()[3:]
    with pytest.MonkeyPatch.context() as patch:
        from qualify import run

        seen = []
        patch.setattr(run, "run", lambda args: seen.append(args) or 0)
        assert cli.main(words) == 0
    assert (seen[0].artifact, str(seen[0].model_dir), seen[0].tp) == ("mova-fp8", "/models", 1)


def test_cdi_where_the_hook_does_not_work(host):
    host(WAY="--device=nvidia.com/gpu=all")
    assert " --device=nvidia.com/gpu=all " in the_run(host)
    assert "--gpus" not in the_run(host)


def test_the_key_goes_as_a_file(host, tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef-secret")
    host(API_KEY_FILE=str(tmp_path / "key"))
    assert f"--volume={tmp_path}/key:/run/secrets/api-key:ro" in the_run(host)
    assert "--env=API_KEY_FILE=/run/secrets/api-key" in the_run(host)


def test_tp_and_ep_are_arguments(host):
    host("--tp", "4", "--ep", "2")
    assert "--tp 4 --ep 2" in the_run(host)
    assert "--full" not in the_run(host)


def test_the_cookbooks_workload_is_asked_for(host):
    host("--full")
    assert " --full " in the_run(host)


@pytest.mark.parametrize(("code", "found"), [("1", 1), ("2", 2)])
def test_the_suites_exit_code(host, code, found):
    done = host(CODE=code)
    assert done.returncode == found
    assert "seal" not in done.stdout


def test_a_container_that_does_not_start(host):
    done = host(CODE="125")
    assert (done.returncode, done.stderr) == (2, "cannot run: the container did not start (above)\n")


@pytest.mark.parametrize(
    ("words", "environment", "code", "says"),
    [
        (["--target", "a100"], {}, 1, "target 'a100' is unknown"),
        (["--target", ""], {}, 1, "target '' is unknown"),
        (["--artifact", "nothing"], {}, 1, "ARTIFACT=nothing: unknown"),
        (["--artifact", "qwen3.6-nvfp4"], {}, 1, "unknown or without an image"),
        (["--model-dir", ""], {}, 1, "MODEL_DIR is not set"),
        (["--model-dir", "/nowhere"], {}, 1, "there is no config.json"),
        (["--tp", "two"], {}, 1, "--tp"),
        ([], {"NO_IMAGE": "1"}, 2, "sudo make image ARTIFACT=mova-fp8"),
        ([], {"WAY": "nothing works"}, 2, "could not select device driver"),
        ([], {"NO_ENGINE": "1"}, 2, "inside a running container or an unpacked root"),
        ([], {"DOCKER": "/nowhere/docker"}, 2, "--tier gpu --artifact mova-fp8 --target h200"),
    ],
)
def test_refused(host, words, environment, code, says):
    done = host(*words, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert says in done.stderr
    assert not [call for call in host.fakes.calls("docker") if "qualify run" in call]
    assert not host.out.exists()
    if code == 1:
        assert host.fakes.calls() == []


@pytest.mark.parametrize("through", ["its name", "a link"])
def test_out_is_never_in_the_checkpoint(host, tmp_path, through):
    (tmp_path / "link").symlink_to(host.model)
    done = host("--out", str((host.model if through == "its name" else tmp_path / "link") / "out"))
    assert (done.returncode, "inside the checkpoint" in done.stderr) == (1, True)
    assert sorted(path.name for path in host.model.iterdir()) == ["config.json"]
