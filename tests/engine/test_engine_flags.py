"""The launcher's table of flags is the engine's, and every plan is one that the engine's own parser takes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import engine_flags, plan, recipe

RECIPES = sorted(path.stem for path in recipe.RECIPES.glob("*.sh") if path.stem != "lib")


def test_table_is_the_engines():
    # Regenerate: python3 -m launch.engine_flags > launch/engine_flags.json, inside the image.
    assert engine_flags.generate() == engine_flags.TABLE.read_text()


@pytest.mark.parametrize("target", ["sm90", "sm120"])
@pytest.mark.parametrize("artifact", RECIPES)
def test_the_engine_parses_a_plan_to_the_planned_values(artifact, target):
    from sglang.srt.server_args import ServerArgs

    environment = {"MODEL_DIR": "/models/m", "ROUTER_PARTITIONS": "2"}
    made = plan.build(recipe.load(artifact), environment, ["--cuda-graph-bs-decode", "1", "2"], target)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    parsed = vars(parser.parse_args(made.arguments))
    for choice in made.choices.values():
        assert parsed[choice.flag.field] == choice.value
    fields = set(ServerArgs.__struct_fields__)
    assert {choice.flag.field for choice in made.choices.values()} | set(made.expect) <= fields


def test_what_the_strict_loader_refuses_never_reaches_it():
    """One fact in two places: the loader's table of flags, and what the launcher refuses in milliseconds."""
    from sglang.srt.layers.quantization import mova_fp8

    from launch import refused

    for _, leaf, _, name in mova_fp8._RUNTIME:
        if leaf != "load_format":  # a fixed flag of every recipe
            assert refused.flag(engine_flags.table()[name].name), name


def test_the_engine_gets_its_key_without_an_argument(tmp_path):
    """The real child process up to the engine's own start, which is replaced by a look at what it was given."""
    look = tmp_path / "look.py"
    look.write_text(
        "import json, sys, sglang.launch_server as server\n"
        "from launch import engine\n"
        "server.run_server = lambda given: print(json.dumps([given.api_key, given.model_path, sys.argv]))\n"
        "engine.main()\n"
    )
    request = {"arguments": ["--model-path", "/models/m"], "api_key": "0123456789abcdef"}
    done = subprocess.run(
        [sys.executable, look], input=json.dumps(request), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(engine_flags.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["0123456789abcdef", "/models/m", [str(look)]]
