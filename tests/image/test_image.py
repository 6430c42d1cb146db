"""The tagged image from outside: configuration, labels, size, and what a commit may and may not change in it.

Needs the images that `make image` tags; `make test` builds them first.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from images import build, docker, stage  # noqa: E402

CACHE = Path(os.environ["HORIZON_CACHE"])
ARTIFACTS = stage.artifacts()


@pytest.fixture(scope="session")
def client():
    return docker.find()


@pytest.fixture(scope="session", params=ARTIFACTS)
def artifact(request):
    return request.param


@pytest.fixture(scope="session")
def image(client, artifact):
    return client.inspect(f"{build.REPOSITORY}/{artifact}:candidate")


@pytest.fixture(scope="session")
def identity(client, artifact):
    text = client.output("run", "--rm", "--network=none", f"{build.REPOSITORY}/{artifact}:candidate",
                         "cat", "/opt/horizon/identity.json")  # fmt: skip
    return json.loads(text)


def test_size_is_below_9_gb(image):
    assert image["Size"] < 9e9


def test_labels_follow_from_the_identity(image, identity):
    labels = {key: value for key, value in image["Config"]["Labels"].items() if not key.startswith("com.docker")}
    assert labels == build.labels(identity)


def test_runs_unprivileged_with_a_health_check(image):
    config = image["Config"]
    assert config["User"] == "10001:0"
    assert config["Entrypoint"] == ["/usr/bin/tini", "--"]
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python3"]
    assert "HF_HUB_OFFLINE=1" in config["Env"]
    assert config["ExposedPorts"] == {"30000/tcp": {}}


def test_health_check_fails_without_a_server(client, image):
    done = client.run("run", "--rm", "--network=none", image["Id"], *image["Config"]["Healthcheck"]["Test"][1:],
                      capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "broken: no server has been launched here\n")


def recipe(client, image, artifact, *words, **environment):
    """The recipe in a container as locked down as it runs in production."""
    variables = [f"--env={name}={value}" for name, value in environment.items()]
    return client.run("run", *build.LOCKED_DOWN, *variables, image["Id"], f"recipes/{artifact}.sh", *words,
                      capture_output=True, text=True, check=False)  # fmt: skip


def test_the_recipe_prints_the_same_line_inside_and_outside(client, image, artifact):
    inside = recipe(client, image, artifact, "--print")
    outside = subprocess.run([ROOT / f"recipes/{artifact}.sh", "--print"], capture_output=True, text=True, check=False)
    assert (inside.returncode, inside.stderr) == (0, "")
    assert inside.stdout == outside.stdout


def test_the_recipe_refuses_before_it_needs_a_gpu(client, image, artifact):
    done = recipe(client, image, artifact, "--trust-remote-code")
    assert (done.returncode, done.stdout) == (1, "")
    done = recipe(client, image, artifact, MODEL_DIR="/tmp", ROUTER_PARTITIONS="2")
    assert (done.returncode, "config.json" in done.stderr) == (1, True)


def test_the_cache_folder_belongs_to_the_user_and_the_group(client, image):
    done = client.output("run", "--rm", "--network=none", image["Id"], "stat", "-c", "%u:%g %a", "/var/cache/horizon")
    assert done == "10001:0 775"


def test_a_container_holds_what_its_label_says(image, identity):
    assert image["Config"]["Labels"]["org.opencontainers.image.revision"] == identity["source_sha256"]


def test_one_layer_for_each_rate_of_change(image):
    # Base, five of wheels, run-time folders, patches, artifact; an empty one for WORKDIR on some engines.
    assert 9 <= len(image["RootFS"]["Layers"]) <= 10


def test_images_differ_in_their_last_layer_alone(client):
    """That is why tests/in_container.sh tests the engine in one of them."""
    layers = [client.inspect(f"{build.REPOSITORY}/{name}:candidate")["RootFS"]["Layers"] for name in ARTIFACTS]
    assert len(layers) > 1
    assert len({tuple(chain[:-1]) for chain in layers}) == 1
    assert len({chain[-1] for chain in layers}) == len(layers)


@pytest.fixture
def checkout(tmp_path):
    """A copy of this checkout that may be changed."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return copy


def built(checkout: Path, artifact: str) -> str:
    """Image ID of a build from that checkout, without the check and the tag."""
    code = (
        "import sys; from pathlib import Path; from images import build, docker\n"
        "with build.exclusive(Path(sys.argv[2])):\n"
        "    context, identity = build.prepare(sys.argv[1], Path(sys.argv[2]))\n"
        "    print(build.docker_build(docker.find(), context, identity))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, artifact, str(CACHE)], cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_no_input_leaves_the_image_equal(image, artifact, checkout):
    for folder in ("docs", "tests", "benchmarks", "evidence"):
        (checkout / folder).mkdir(exist_ok=True)
        (checkout / folder / "new.md").write_text("a receipt, a page, a result\n")
    (checkout / "README.md").write_text("another text\n")
    assert built(checkout, artifact) == image["Id"]


def test_an_input_changes_the_image(client, image, artifact, checkout):
    """A recipe changes the last layer and nothing below it; an edit of equal length counts too."""
    recipe = checkout / "recipes" / f"{artifact}.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace("# ", "#.", 1))
    assert len(recipe.read_text()) == len(text)
    other = client.inspect(built(checkout, artifact))
    try:
        assert other["RootFS"]["Layers"][:-1] == image["RootFS"]["Layers"][:-1]
        assert other["RootFS"]["Layers"][-1] != image["RootFS"]["Layers"][-1]
    finally:
        client.output("image", "rm", other["Id"])
