"""Plans: what is refused, what overrides what, and what the printed line says."""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from launch import arguments, plan, recipe, refused
from launch.engine_flags import table
from qualify import catalogue
from qualify.errors import CannotRun, Rejected
from qualify.models import assumed

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "recipes").glob("*-*.sh"))
DECLARED = {"MODEL_DIR": "/models/m", "ROUTER_PARTITIONS": "2"}


def build(*passed: str, target: str = "sm90", placeholders: bool = False, **environment: str) -> plan.Plan:
    return plan.build(recipe.load("mova-fp8"), DECLARED | environment, passed, target, placeholders)


def refusal(*passed: str, **environment: str) -> str:
    with pytest.raises(Rejected) as caught:
        build(*passed, **environment)
    return str(caught.value)


def run(script: Path, *passed: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run([script, *passed], env=clean | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_print_needs_nothing_and_is_one_line_that_a_shell_reads(script, tmp_path):
    done = subprocess.run(
        [script, "--print"], env={"PATH": os.environ["PATH"]}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    words = shlex.split(done.stdout)
    assert words[:2] == ["sglang", "serve"]
    assert "<MODEL_DIR>" in words
    for declared in recipe.load(script.stem).declarations:
        assert any(f"<{declared.variable}>" in word for word in words)


def test_every_flag_of_a_recipe_is_the_engines_and_has_a_reason():
    for path in (ROOT / "recipes").glob("*.toml"):
        if "launch" in tomllib.loads(path.read_text()):
            for setting in recipe.load(path.stem).settings:
                assert table()[setting.flag].name == setting.flag
                assert len(setting.reason) > 15


def test_plan_of_the_recipe():
    made = build()
    assert made.value("--dtype") == "bfloat16"
    assert made.value("--attention-backend") == "fa3"
    assert json.loads(made.value(plan.OVERRIDES)) == {"xllm_source_router_gemm_partitions": 2}
    assert (made.tp, made.ep, made.value("--host"), made.key) == (1, 1, "127.0.0.1", None)
    assert "--trust-remote-code" not in made.arguments
    assert made.declared["ROUTER_PARTITIONS"]["said_by"] == "operator, by environment ROUTER_PARTITIONS"
    assert build(ROUTER_PARTITIONS_SAID_BY="J. Doe").declared["ROUTER_PARTITIONS"]["said_by"] == "J. Doe"


def test_sm120_has_no_fa3():
    assert build(target="sm120").value("--attention-backend") == "triton"
    with pytest.raises(Rejected, match="needs triton on sm120"):
        build("--attention-backend", "fa3", target="sm120")


K2 = recipe.load("k2-horizon-fp8")
SIZES = {model.name: model.config for model in K2.models}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder whose config.json is that of one size, with other values on top."""

    def write(name: str, **changes) -> str:
        (tmp_path / "config.json").write_text(json.dumps(SIZES[name] | changes))
        return str(tmp_path)

    return write


def k2(folder: str = "/nowhere", *passed: str, printing: bool = False, **environment: str) -> plan.Plan:
    said = {"MODEL_DIR": folder} if folder else {}
    return plan.build(K2, said | environment, passed, "sm90", printing)


@pytest.mark.parametrize(("name", "tp", "ep"), [("7b", 1, 1), ("32b", 2, 1), ("375b-a23b", 8, 8)])
def test_the_size_decides_the_plan(checkpoint, name, tp, ep):
    for made in (k2(checkpoint(name)), k2(checkpoint(name), MODEL=name), k2("", printing=True, MODEL=name)):
        assert (made.model, made.tp, made.ep) == (name, tp, ep)
        assert ("--ep-size" in made.arguments) is (ep > 1)
    [entry] = [entry for entry in catalogue.load()["k2-horizon-fp8"].checkpoints if entry.name == name]
    assert (tp, ep) in entry.topologies
    assert "--ep-size 8" in k2("", printing=True, MODEL="375b-a23b").command


def test_the_size_is_that_of_the_published_config(tmp_path):
    published = (ROOT / "tests/data/K2-Horizon-7B-FP8.config.json").read_text()
    (tmp_path / "config.json").write_text(published)
    assert k2(str(tmp_path)).model == "7b"
    assert SIZES["375b-a23b"].items() <= assumed.KNOWN_375B.items()


def test_a_dense_config_need_not_count_its_experts(checkpoint):
    assert k2(checkpoint("7b", num_experts=None)).model == "7b"


def test_a_size_that_contradicts_the_checkpoint_is_refused(checkpoint):
    for printing in (False, True):
        with pytest.raises(Rejected, match=r"for 375b-a23b, and config\.json is that of 7b \(hidden_size 4096"):
            k2(checkpoint("7b"), MODEL="375b-a23b", printing=printing)
    with pytest.raises(Rejected, match="MODEL=9b: must be one of 7b, 32b, 375b-a23b"):
        k2(MODEL="9b")
    assert "MODEL=7b: leave it out" in refusal(MODEL="7b")


def test_an_unknown_size_has_no_plan_to_print(checkpoint, tmp_path):
    with pytest.raises(Rejected, match=r"hidden_size 4097, .*of no size that k2-horizon-fp8 has a plan for"):
        k2(checkpoint("7b", hidden_size=4097), printing=True)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(Rejected, match=r"no usable config\.json to read the size from: set MODEL to 7b or 32b or"):
        k2(str(tmp_path), printing=True)
    assert k2(str(tmp_path), printing=True, MODEL="32b").model == "32b"


def test_a_size_does_not_take_choices_away(checkpoint):
    made = k2(checkpoint("375b-a23b"), "--tp-size", "4", EP="2", CONTEXT_LENGTH="4096")
    assert (made.tp, made.ep, made.value("--context-length")) == (4, 2, 4096)
    with pytest.raises(Rejected, match="needs triton"):
        k2(checkpoint("375b-a23b"), "--moe-runner-backend", "cutlass")
    with pytest.raises(Rejected, match="EP divides TP"):
        k2(checkpoint("375b-a23b"), TP="4")  # EP is 8 there


def test_a_flag_for_a_size_that_is_not_there_is_our_fault(tmp_path):
    text = (ROOT / "recipes/k2-horizon-fp8.toml").read_text()
    (tmp_path / "k2-horizon-fp8.toml").write_text(text.replace('models = ["32b"]', 'models = ["33b"]'))
    with pytest.raises(CannotRun, match="no model 33b"):
        recipe.load("k2-horizon-fp8", tmp_path)


def test_settings_follow_the_topology():
    assert build().value("--context-length") == 262144
    assert build(TP="2").value("--context-length") == 524288
    assert build("--tp-size", "2").value("--context-length") == 524288


def test_variable_and_argument_override_a_default():
    assert build(MAX_RUNNING="32").value("--max-running-requests") == 32
    assert build("--max-running-requests=16").value("--max-running-requests") == 16
    assert build("--max-running-requests", "32", MAX_RUNNING="32").value("--max-running-requests") == 32
    assert build(MAX_RUNNING="").value("--max-running-requests") == 64
    assert build("--page-size", "64").arguments[-2:] == ["--page-size", "64"]


@pytest.mark.parametrize(
    ("passed", "environment", "says"),
    [
        (["--dtype", "float16"], {}, "--dtype float16: mova-fp8 needs bfloat16"),
        (["--dtype", "auto"], {}, "--dtype auto: mova-fp8 needs bfloat16"),
        (["--load-format", "dummy"], {}, "--load-format dummy"),
        (["--max-running-requests", "8"], {"MAX_RUNNING": "9"}, "contradicts environment MAX_RUNNING=9"),
        (["--tp-size", "2", "--tensor-parallel-size", "4"], {}, "--tp-size is given twice"),
        (["--page-size", "1", "--page-size=64"], {}, "--page-size is given twice"),
        (["--no-enable-tf32-matmul", "--enable-tf32-matmul"], {}, "given twice"),
        (["--max-running"], {}, "did you mean --max-running-requests"),
        (["--tp", "2"], {}, "did you mean --tp-size"),
        (["--no-such-flag"], {}, "--no-such-flag is no flag of the engine"),
        (["--Dtype", "bfloat16"], {}, "--Dtype is no flag"),
        (["-x"], {}, "'-x' is no flag"),
        (["/models/other"], {}, "the model directory is MODEL_DIR"),
        (["--"], {}, "'--' is no flag"),
        (["--port"], {}, "--port needs a value"),
        (["--port", "--enable-metrics"], {}, "--port needs a value"),
        (["--port", "eighty"], {}, "--port eighty: must be a number"),
        (["--port", "80.5"], {}, "whole number"),
        (["--enable-metrics=1"], {}, "--enable-metrics takes no value"),
        (["--enable-metrics", "1"], {}, "'1' is no flag"),
        (["--kv-cache-dtype", "fp7"], {}, "must be one of"),
        (["--cuda-graph-bs-decode"], {}, "needs a value"),
        (["--preferred-sampling-params", "{"], {}, "must be JSON"),
        (["--config", "flags.yaml"], {}, "a file of flags"),
        (["--config=flags.yaml"], {}, "a file of flags"),
        (["--api-key", "secret"], {}, "set API_KEY_FILE"),
        (["--admin-api-key", "secret"], {}, "--admin-api-key"),
        (["--json-model-override-args", "{}"], {}, "declared by variables"),
        (["--quantization", "fp8"], {}, "leave the flag out"),
        (["--enable-eplb"], {}, "--enable-eplb"),
        (["--pp-size", "2"], {}, "--pp-size"),
        (["--host", "0.0.0.0"], {}, "without an API key"),
        (["--host", "example.org"], {}, "give an IP address"),
        ([], {"HOST": "::"}, "without an API key"),
        ([], {"MODEL_DIR": ""}, "MODEL_DIR is not set"),
        ([], {"ROUTER_PARTITIONS": ""}, "ROUTER_PARTITIONS is not set"),
        ([], {"ROUTER_PARTITIONS": "3"}, "must be 1 or 2"),
        ([], {"ROUTER_PARTITIONS": "02"}, "must be 1 or 2"),
        ([], {"TP": "two"}, "must be a number"),
        ([], {"TP": "4", "EP": "3"}, "EP divides TP"),
        ([], {"TP": "0"}, "--tp-size 0: must be between 1"),
        ([], {"PORT": "0"}, "--port 0: must be between 1"),
        ([], {"PORT": "99999"}, "must be between 1 and 65,535"),
        ([], {"MEM_FRACTION": "2"}, "must be between 0.05 and 0.99"),
        ([], {"MEM_FRACTION": "1e400"}, "must be a finite number"),
        ([], {"CONTEXT_LENGTH": "-5"}, "must be between 1"),
        ([], {"MAX_RUNNING": "0"}, "must be between 1"),
        ([], {"SERVED_MODEL_NAME": "--trust-me"}, "does not begin with a dash"),
        (["--served-model-name="], {}, "not empty"),
        (["--model-checksum=--load-format=dummy"], {}, "--model-checksum"),
        (["--chat-template=--quantization=fp8"], {}, "does not begin with a dash"),
        (["--ssl-certfile", "c.pem"], {}, "plain HTTP"),
        (["--nnodes", "2"], {}, "on this machine"),
        (["--forward-hooks", "[]"], {}, "nobody has inspected"),
        (["--decode-attention-backend", "triton"], {}, "give --attention-backend"),
        (["--enable-memory-saver"], {}, "strict loader"),
        (["--speculative-draft-model-path", "/m"], {}, "nobody has inspected"),
        (["--enable-custom-logit-processor"], {}, "bring code with them"),
        ([], {"SGLANG_EXTERNAL_MODEL_PACKAGE": "x"}, "environment SGLANG_EXTERNAL_MODEL_PACKAGE"),
        ([], {"SGLANG_GRPC_PORT": "1"}, "would change the engine"),
        ([], {"API_KEY": "0123456789abcdef"}, "set API_KEY_FILE"),
        ([], {"SGLANG_CACHE_DIR": "/models/m"}, "environment SGLANG_CACHE_DIR"),
        ([], {"SGL_FORCE_SHUTDOWN": "1"}, "environment SGL_FORCE_SHUTDOWN"),
        ([], {"SGLANG_PORT": "8000"}, "environment SGLANG_PORT"),
        ([], {"NVIDIA_TF32_OVERRIDE": "1"}, "environment NVIDIA_TF32_OVERRIDE"),
        ([], {"HOST": "10.1.2.3"}, "without an API key"),
        ([], {"SERVED_MODEL_NAME": "-1e5"}, "does not begin with a dash"),
        (["--fastapi-root-path", "/health"], {}, "paths that need no key"),
        (["--delete-ckpt-after-loading"], {}, "never touched"),
        (["--tokenizer-path", "/m"], {}, "nobody has inspected"),
        (["--moe-dp-size", "2"], {}, "only tensor and expert parallelism"),
        (["--kv-events-config", "{}"], {}, "one port is served"),
        (["--cpu-offload-gb", "8"], {}, "strict loader"),
        ([], {"ALLOW_NO_KEY": "yes"}, "ALLOW_NO_KEY=yes"),
        ([], {"UNCATALOGUED": "true"}, "UNCATALOGUED=true"),
        ([], {"SGLANG_FP8_IGNORED_LAYERS": "lm_head"}, "environment SGLANG_FP8_IGNORED_LAYERS"),
    ],
)
def test_refused(passed, environment, says):
    message = refusal(*passed, **environment)
    assert says in message
    assert "\n" not in message


REMOTE = [
    "--trust-remote-code", "--trust_remote_code", "--trust-remote-code=true", "--TRUST-REMOTE-CODE", "--trust",
    "--trust-remote", "-trust-remote-code", "trust_remote_code", "--trustremotecode",
    '--model-loader-extra-config={"trust_remote_code": true}',
]  # fmt: skip


@pytest.mark.parametrize("word", REMOTE)
def test_remote_code_is_refused_however_spelled(word):
    assert "never run" in refusal(word)
    assert "never run" in refusal("--page-size", "1", word)


@pytest.mark.parametrize("name", ["TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE", "HfTrustRemoteCode"])
def test_remote_code_by_environment(name):
    assert "never run" in refusal(**{name: "1"})
    assert build(**{name: "0"}).tp == 1


def test_remote_code_as_a_value_of_another_flag():
    assert "never run" in refusal("--model-loader-extra-config", '{"trust-remote-code": 1}')


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("passed", [["--trust-remote-code"], ["--dtype", "half"], ["--conf"], ["--config", "x"]])
def test_scripts_exit_1_with_one_sentence(script, passed):
    for mode in ([], ["--print"]):
        done = run(script, *mode, *passed, **DECLARED)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("rejected: ")
        assert done.stderr.count("\n") == 1


def test_key_comes_from_a_file_and_stays_out_of_sight(tmp_path):
    file = tmp_path / "key"
    file.write_text("0123456789abcdef-secret\n")
    made = build(API_KEY_FILE=str(file))
    assert (made.key, made.value("--host")) == ("0123456789abcdef-secret", "0.0.0.0")
    assert "secret" not in repr(made) + json.dumps(made.as_dict()) + made.command
    assert build(API_KEY_FILE=str(file), HOST="127.0.0.1").value("--host") == "127.0.0.1"
    assert "contradict" in refusal(API_KEY_FILE=str(file), ALLOW_NO_KEY="1")


@pytest.mark.parametrize(
    "content",
    ["", "\n", "tiny-key", "0123456789abcde f0123", 'quote"0123456789abcdef', "line\nline0123456789abc",
     "é0123456789abcdef0123", "back\\slash0123456789"],
)  # fmt: skip
def test_unusable_key(tmp_path, content):
    file = tmp_path / "key"
    file.write_text(content)
    message = refusal(API_KEY_FILE=str(file))
    assert "16 printable" in message
    assert content.strip() == "" or content.strip() not in message


def test_missing_key_file(tmp_path):
    assert "No such file" in refusal(API_KEY_FILE=str(tmp_path / "none"))


def test_print_says_that_a_key_belongs_there(tmp_path):
    made = build(placeholders=True, API_KEY_FILE=str(tmp_path / "none"))
    assert made.command.endswith("--api-key '<API_KEY>'")
    assert "api-key" not in build(placeholders=True).command
    assert made.as_dict()["api_key"] is True


def test_a_folder_for_a_key(tmp_path):
    assert "Docker makes where the mounted file is missing" in refusal(API_KEY_FILE=str(tmp_path))


def test_refusals_are_the_engines_flags():
    names = {flag.name for flag in table().values()}
    for pattern in refused.FLAGS:
        assert any(fnmatch.fnmatchcase(name, pattern) for name in names), pattern


def test_variables_that_change_nothing_are_taken():
    assert build(SGLANG_LOG_MS="1", REVISION=" " + "a" * 40 + " ").revision == "a" * 40


def test_service_links_of_kubernetes_are_no_settings():
    links = {"SGLANG_SERVICE_HOST": "10.0.0.1", "SGLANG_SERVICE_PORT_HTTP": "80", "SGLANG_PORT": "tcp://10.0.0.1:80"}
    links |= {"SGLANG_PORT_80_TCP_ADDR": "10.0.0.1"}
    assert build(**links).tp == 1
    assert refused.inherited(links | {"SGLANG_LOG_MS": "1", "SGLANG_WARMUP_TIMEOUT": " ", "A": ""}) == {
        "SGLANG_LOG_MS": "1",
        "A": "",
    }


def test_json_is_handed_on_as_json():
    made = build("--extra-metric-labels", "[1]", "--preferred-sampling-params", '{"top_k": 3}')
    assert made.arguments[-4:] == ["--extra-metric-labels", "[1]", "--preferred-sampling-params", '{"top_k": 3}']


def test_values_that_look_odd_and_are_fine():
    assert build(MEM_FRACTION=".85").value("--mem-fraction-static") == 0.85
    assert build("--chunked-prefill-size", "-1").value("--chunked-prefill-size") == -1


def test_scripts_run_through_a_link_and_with_an_odd_cdpath(tmp_path):
    for script in SCRIPTS:
        link = tmp_path / script.name
        link.symlink_to(script)
        done = subprocess.run(
            [link, "--print"], cwd=tmp_path, env=os.environ | {"CDPATH": "/tmp:/"}, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_no_key_has_to_be_said_out_loud():
    assert build(ALLOW_NO_KEY="1").value("--host") == "0.0.0.0"


def test_unknown_artifact_and_artifact_without_recipe():
    with pytest.raises(Rejected, match="unknown"):
        recipe.load("nothing")
    with pytest.raises(Rejected, match="no \\[launch\\] part"):
        recipe.load("e2m1-k32")


def test_a_broken_artifact_file_is_our_fault(tmp_path):
    (tmp_path / "a.toml").write_text(
        'artifact = "a"\n[targets.sm90]\nstatus = "not-run"\n[[launch.flags]]\nflag = "--nope"\n'
    )
    with pytest.raises(CannotRun, match=r"a\.toml"):
        recipe.load("a", tmp_path)


def test_parsed_words_are_what_the_engine_gets():
    given = arguments.parse(["--cuda-graph-bs-decode", "1", "2", "4", "--enable-metrics", "--no-enable-tf32-matmul"])
    assert list(given.values()) == [[1, 2, 4], True, False]
    assert build("--no-enable-tf32-matmul").arguments[-1] == "--no-enable-tf32-matmul"
