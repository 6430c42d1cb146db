"""Nothing private gets into a receipt: each kind of private thing is planted in each free field, and looked for."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from qualify import cli
from qualify.receipt import sanitise
from tests.unit import receipt_runs as runs

HOST = "build-node-17"
PLANTS = {
    # what is planted: (the text, what the refusal calls it, what must not be in any file)
    "host name": (f"ran on {HOST}.example today", "the name of a host or a user", HOST),
    "short host name": (f"{HOST.upper()}: lost", "the name of a host or a user", HOST),
    "user name": ("as wmiller, twice", "the name of a host or a user", "wmiller"),
    "given name": ("in rack42", "the name of a host or a user", "rack42"),
    "name in the DNS": ("rack9.cluster.internal:29500", "the name of a host or a user", "rack9"),
    "name of an address": ("ip-10-20-30-40 was lost", "the name of a host or a user", "ip-10"),
    "path": ("see /srv/models/x", "a path that is not one of the container's", "srv"),
    "path behind a sign": ("path=/mnt/data1", "a path that is not one of the container's", "data1"),
    "home": ("~/models/x", "a path that is not one of the container's", "~/"),
    "way out of a known folder": ("/models/../etc/x", "a path that is not one of the container's", "../etc"),
    "relative way out": ("../../scratch7", "a path that is not one of the container's", "scratch7"),
    "drive": ("C:\\models\\x", "a path that is not one of the container's", "C:"),
    "IPv4 address": ("10.20.30.40 did not answer", "a network address", "10.20.30.40"),
    "IPv4 address and port": ("192.168.7.9:30000", "a network address", "192.168"),
    "IPv6 address": ("fe80::1ff:fe23:4567:890a", "a network address", "fe80"),
    "short IPv6 address": ("at [2001:db8::5]:30000", "a network address", "2001:db8"),
    "mapped address": ("::ffff:10.1.2.3", "a network address", "10.1.2.3"),
    "hardware address": ("02:42:ac:11:00:02", "a network address", "02:42"),
    "URL": ("https://ci.example.com/job/7", "a URL", "example.com"),
    "e-mail address": ("ask jane.doe@example.com", "an e-mail address or user@host", "jane"),
    "user at host": ("jane@box", "an e-mail address or user@host", "jane@"),
    "Hugging Face token": ("hf_" + "AbCdEfGhIjKlMnOpQr", "what looks like a token or a key", "hf_Ab"),
    "OpenAI key": ("sk-" + "proj-abcdefgh12345678", "what looks like a token or a key", "sk-proj"),
    "GitHub token": ("ghp_" + "a1B2c3D4e5F6g7H8", "what looks like a token or a key", "ghp_"),
    "AWS key": ("AKIA" + "IOSFODNN7EXAMPLE", "what looks like a token or a key", "AKIA"),
    "bearer": ("Authorization: Bearer abc", "what looks like a token or a key", "Bearer"),
    "assigned key": ("API_KEY=hunter2", "what looks like a token or a key", "hunter2"),
    "npm token": ("npm_" + "AbCdEfGh12345", "what looks like a token or a key", "npm_"),
    "registry token": ("dckr_pat_" + "AbCdEfGh12", "what looks like a token or a key", "AbCdEfGh12"),
    "identifier of a GPU": ("of 8f6b2c1e-1234-4abc-9def-0123456789ab", "what looks like a token or a key", "8f6b"),
    "password": ('"password": "hunter2"', "what looks like a token or a key", "hunter2"),
    "hex": ("0f" * 16, "what looks like a token or a key", "0f0f"),
    "digest where none belongs": ("ab12" * 16, "what looks like a token or a key", "ab12"),
    "base64": ("c2VjcmV0IHRva2VuIG9mIHNvbWUgbGVuZ3Ro", "what looks like a token or a key", "c2VjcmV0"),
    "base64url": ("Xk29-dLm4_Qp8sZt3VbN7wRr5-Yy6Uu8_Ii9Oo0Pp", "what looks like a token or a key", "Xk29"),
    "private key": ("-----BEGIN PRIVATE KEY-----", "what looks like a token or a key", "BEGIN"),
    "line break": ("one\ntwo", "characters that are not printable ASCII", "two"),
    "escape": ("\x1b[31mcrimson", "characters that are not printable ASCII", "crimson"),
}  # fmt: skip
#: free fields: (run.json changes, stages changes) with a text in them, and where the refusal says it is
FIELDS = {
    "said_by": lambda t: (
        {"declared": {"ROUTER_PARTITIONS": {"said_by": t}}},
        {},
        "declared.ROUTER_PARTITIONS.said_by",
    ),
    "flag": lambda t: ({"flags": {"--served": t}}, {}, "flags.--served"),
    "flags": lambda t: ({"flags": {"--many": ["a", t]}}, {}, "flags.--many[1]"),
    "reason": lambda t: ({}, {"load": {"result": "failed", "reason": t}}, "stages.load.reason"),
    "test": lambda t: ({}, {"load": {"tests": {"passed": [t]}}}, "stages.load.tests.passed[0]"),
    "number": lambda t: ({}, {"load": {"numbers": {"deep": {"x": t}}}}, "stages.load.numbers.deep.x"),
}


@pytest.fixture
def seal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: f"{HOST}.example")
    monkeypatch.setenv("SUDO_USER", "wmiller")
    monkeypatch.delenv("HOSTNAME", raising=False)
    policy = runs.measured_policy(tmp_path)
    (tmp_path / "inspect.json").write_text(json.dumps(runs.inspect()))
    (tmp_path / "evidence").mkdir()

    def call(run=None, stages=None):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        runs.write(tmp_path / "run", runs.facts(policy, **(run or {})), stages)
        code = cli.main(
            ["seal", "--run", str(tmp_path / "run"), "--image-inspect", str(tmp_path / "inspect.json"),
             "--policy", str(policy), "--private", "rack42", "--out", str(tmp_path / "evidence/receipt.json")]
        )  # fmt: skip
        return code, capsys.readouterr().err

    call.evidence = tmp_path / "evidence"
    return call


def test_without_a_plant_it_is_sealed(seal):
    assert seal() == (0, "")
    text = (seal.evidence / "receipt.json").read_text()
    for _, _, needle in PLANTS.values():
        if needle not in ("AKIA", "two", "C:"):
            assert needle not in text


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("plant", PLANTS)
def test_planted(seal, plant, field):
    text, kind, needle = PLANTS[plant]
    run, stages, where = FIELDS[field](text)
    code, err = seal(run, stages)
    assert code == 1
    assert err.startswith("rejected: predicate.horizonImages.")
    assert f"{where} holds {kind}" in err
    assert err.count("\n") == 1
    # Neither in what was said, nor in a file beside the run.
    assert needle not in err
    assert list(seal.evidence.iterdir()) == []


@pytest.mark.parametrize(
    ("run", "stages"),
    [
        ({}, {"load": {"numbers": {HOST: 1}}}),
        ({}, {"load": {"numbers": {"deep": {"hf_" + "AbCdEfGhIjKlMnOpQr": 1}}}}),
        ({"target_name": HOST}, {}),
        ({"checkpoint": {"repository": f"IFM/{HOST}"}}, {}),
        ({"image": {"substituted_libraries": ["/home/x/lib"]}}, {}),
        ({"declared": {"ROUTER_PARTITIONS": {"value": HOST}}}, {}),
    ],
)
def test_planted_in_keys_and_in_fields_of_a_fixed_form(seal, run, stages):
    code, err = seal(run, stages)
    assert code == 1
    assert " holds " in err
    assert HOST not in err
    assert list(seal.evidence.iterdir()) == []


@pytest.mark.parametrize("flag", ["--api-key", "--admin-api-key", "--hf-token", "--ssl-keyfile-password"])
def test_a_secret_that_is_an_ordinary_word(seal, flag):
    code, err = seal({"flags": {flag: "hunter"}})
    assert code == 1
    assert f"flags.{flag} holds what looks like a token or a key" in err
    assert "hunter" not in err
    assert seal({"flags": {flag: None}})[0] == 0


HARMLESS = [
    "torch.nn.functional.scaled_mm, threading.local, asyncio.base_events, sglang.srt.layers.moe",
    "--tokenizer-mode auto --max-running-requests 64",
    '{"xllm_source_router_gemm_partitions": 2, "eos_token": 5}',
    "IFM/K2-Horizon-MoVA-36B-A4B-FP8",
    "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "gpu/test_load.py::test_every_parameter_equals_its_source[fp8-1]",
    "CompressedTensorsW8A8Fp8MoEMethod",
    "UnquantizedEmbeddingMethod",
    "xllm_source_router_gemm_partitions",
    "model.layers.3.mlp.experts.w13_weight_scale_inv",
    "/server_info equals the plan",
    "http://127.0.0.1:30000/health answered",
    "http://localhost:30000/v1/models",
    "[::1]:30000 and 127.0.0.1 are loopback",
    "580.159.04",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "2026-11-30T21:00:00Z",
    "512/512 tokens, 81.5 tokens/s and/or more",
    "/opt/horizon/recipes/mova-fp8.toml, /models/config.json.",
    "read-only root file system",
    "18446744073709551615",
    "0.5.23-861e5275615d",
    "operator, by environment ROUTER_PARTITIONS",
    "the server's process ended with -9",
    "TP1+EP1: 48.35 GB",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless(text):
    assert sanitise.defect(text, {HOST, "wmiller"}) is None


@pytest.mark.parametrize("plant", PLANTS)
def test_redacted(monkeypatch, plant):
    """What a stage says of itself, before it is written."""
    monkeypatch.setattr(sanitise, "names_here", lambda: {HOST, "wmiller", "rack42"})
    text, _, needle = PLANTS[plant]
    told = sanitise.redact(f"the launcher ended: {text}")
    assert sanitise.find([told], {HOST, "wmiller", "rack42"}) is None
    assert needle not in told or plant == "line break"


def test_redaction_leaves_what_says_why(monkeypatch):
    monkeypatch.setattr(sanitise, "names_here", set)
    told = "CUDA out of memory. Tried to allocate 20.00 MiB. See (https://pytorch.org/x) 12%|\u2588\u258e | 1/8"
    assert sanitise.redact(told) == "CUDA out of memory. Tried to allocate 20.00 MiB. See [...] [...] | 1/8"
    assert sanitise.redact("the server ended") == "the server ended"


def test_names_here(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host.its.domain")
    monkeypatch.setenv("HOSTNAME", "container-name")
    monkeypatch.setenv("USER", "somebody")
    assert {"a-host", "a-host.its.domain", "container-name", "somebody"} <= sanitise.names_here()


def test_names_that_say_nothing_are_no_names():
    assert sanitise.find({"a": "the root user on localhost"}, ["root", "user", "localhost", "", "a"]) is None


def test_numbers_may_have_such_names():
    assert sanitise.find({"input_tokens": 512, "password": None, "api_key": "", "--tokenizer-mode": "auto"}) is None


def test_a_digest_is_exempt_where_it_belongs_and_only_in_its_form():
    digest = "ab12" * 16
    assert sanitise.find({"file_sha256": digest}) is None
    assert sanitise.find({"digest": {"sha256": digest}, "x": {"digest": {"sha256": digest}}}) is not None
    assert sanitise.find({"file_sha256": digest + "\n"}) is not None
    assert sanitise.find({"note": digest}) == "note holds what looks like a token or a key"
