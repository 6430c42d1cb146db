"""Signatures: a DSSE envelope by a local key, asked for and checked only when asked."""

from __future__ import annotations

import base64
import json
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from qualify import cli
from qualify.receipt import sanitise
from tests.unit import receipt_runs as runs


def pem(folder, name: str, key) -> tuple[str, str]:
    """Paths of private and public key."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return str(private), str(public)


@pytest.fixture
def lab(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sanitise, "names_here", set)  # whatever the host of the tests is called

    class Lab:
        out = tmp_path / "receipt.json"
        policy = runs.measured_policy(tmp_path)
        private, public = pem(tmp_path, "key", ed25519.Ed25519PrivateKey.generate())

        def seal(self, *words):
            return self.call(
                "seal",
                "--run",
                tmp_path / "run",
                "--image-inspect",
                tmp_path / "inspect.json",
                "--out",
                self.out,
                *words,
            )

        def verify(self, *words):
            return self.call("verify-receipt", self.out, *words)

        def call(self, *words):
            code = cli.main([*map(str, words), "--policy", str(self.policy)])
            told = capsys.readouterr()
            self.said = told.out + told.err
            return code

    lab = Lab()
    runs.write(tmp_path / "run", runs.facts(lab.policy))
    (tmp_path / "inspect.json").write_text(json.dumps(runs.inspect()))
    lab.folder = tmp_path
    return lab


def test_an_envelope_holds_the_receipt_as_it_is_without_one(lab):
    assert lab.seal() == 0, lab.said
    bare = lab.out.read_bytes()
    lab.out.unlink()
    assert lab.seal("--sign", lab.private) == 0, lab.said
    envelope = json.loads(lab.out.read_text())
    assert set(envelope) == {"payload", "payloadType", "signatures"}
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert base64.b64decode(envelope["payload"]) == bare


def test_signed_and_verified(lab):
    lab.seal("--sign", lab.private)
    assert lab.verify() == 0
    assert "signature: not checked (--public-key)" in lab.said
    assert lab.verify("--public-key", lab.public, "--json") == 0, lab.said
    assert json.loads(lab.said)["signed_by"] == json.loads(lab.out.read_text())["signatures"][0]["keyid"]


def test_an_ecdsa_key(lab):
    private, public = pem(lab.folder, "ec", ec.generate_private_key(ec.SECP256R1()))
    assert lab.seal("--sign", private) == 0
    assert lab.verify("--public-key", public) == 0


def test_by_another_key(lab):
    _, public = pem(lab.folder, "other", ed25519.Ed25519PrivateKey.generate())
    lab.seal("--sign", lab.private)
    assert lab.verify("--public-key", public) == 1
    assert lab.said == "rejected: no signature of the envelope is by the key of --public-key\n"


def test_another_tools_key_id_does_not_matter(lab):
    lab.seal("--sign", lab.private)
    envelope = json.loads(lab.out.read_text())
    envelope["signatures"][0]["keyid"] = ""
    lab.out.write_text(json.dumps(envelope))
    assert lab.verify("--public-key", lab.public) == 0, lab.said


def test_a_consistent_receipt_that_was_not_the_signed_one(lab):
    """What content_sha256 alone cannot catch: sealed anew by somebody else."""
    lab.seal("--sign", lab.private)
    signed = json.loads(lab.out.read_text())
    lab.out.unlink()
    runs.write(lab.folder / "run", runs.facts(lab.policy), {"load": {"seconds": 1.0}})
    lab.seal()
    lab.out.write_text(json.dumps(signed | {"payload": base64.b64encode(lab.out.read_bytes()).decode()}))
    assert lab.verify() == 0
    assert lab.verify("--public-key", lab.public) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"signatures": [{"keyid": "x", "sig": "!"}]},
        {"signatures": [{"sig": "AAAA"}]},
        {"signatures": [{"keyid": 7, "sig": "AAAA"}]},
        {"payloadType": "application/json"},
        {"more": 1},
        {"payload": None},
    ],
)
def test_a_damaged_envelope_is_one_sentence(lab, change):
    lab.seal("--sign", lab.private)
    lab.out.write_text(json.dumps(json.loads(lab.out.read_text()) | change))
    assert lab.verify("--public-key", lab.public) == 1
    assert lab.said.startswith("rejected: ")
    assert lab.said.count("\n") == 1


@pytest.mark.parametrize("change", [{"payloadType": "application/vnd.in-toto.bundle"}, {"more": 1}])
def test_an_envelope_of_something_else_needs_no_key_to_be_refused(lab, change):
    lab.seal("--sign", lab.private)
    envelope = json.loads(lab.out.read_text())
    lab.out.write_text(json.dumps(envelope | change))
    assert lab.verify() == 1
    assert lab.said.startswith("rejected: the envelope")


def test_a_payload_is_read_in_one_way(lab):
    """Other decoders skip what is no base64: they and we would read different receipts."""
    lab.seal("--sign", lab.private)
    envelope = json.loads(lab.out.read_text())
    lab.out.write_text(json.dumps(envelope | {"payload": "!" + envelope["payload"]}))
    assert lab.verify() == 1
    assert lab.said == "rejected: the envelope's payload is not base64\n"


def test_two_signatures(lab):
    """The one that is asked for counts, wherever it stands."""
    private, public = pem(lab.folder, "second", ed25519.Ed25519PrivateKey.generate())
    lab.seal("--sign", private)
    second = json.loads(lab.out.read_text())
    lab.out.unlink()
    lab.seal("--sign", lab.private)
    both = json.loads(lab.out.read_text())
    both["signatures"] += second["signatures"]
    lab.out.write_text(json.dumps(both))
    for key in (lab.public, public):
        assert lab.verify("--public-key", key) == 0, lab.said
    both["signatures"][1]["sig"] = "AAAA"
    lab.out.write_text(json.dumps(both))
    assert lab.verify("--public-key", public) == 1


def test_an_unsigned_receipt_is_not_by_a_key(lab):
    lab.seal()
    assert lab.verify("--public-key", lab.public) == 1
    assert lab.said == "rejected: the receipt is not signed: it is no DSSE envelope\n"


def test_a_signed_receipt_is_not_replaced_by_an_unsigned_one(lab):
    lab.seal("--sign", lab.private)
    before = lab.out.read_bytes()
    assert lab.seal() == 1
    assert "receipt.json is signed" in lab.said
    assert lab.out.read_bytes() == before


@pytest.mark.parametrize("content", ["", "no key", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_no_key(lab, content):
    (lab.folder / "bad.pem").write_text(content)
    assert lab.seal("--sign", lab.folder / "bad.pem") == 1
    assert lab.said.startswith("rejected: --sign is no unencrypted PEM private key")
    assert not lab.out.exists()
    assert lab.seal("--sign", lab.folder / "none.pem") == 1
    assert lab.said == "rejected: --sign cannot be read: No such file or directory\n"
    lab.seal("--sign", lab.private)
    assert lab.verify("--public-key", lab.folder / "bad.pem") == 1
    assert lab.said.startswith("rejected: --public-key is no PEM public key")


def test_an_encrypted_key(lab):
    key = ed25519.Ed25519PrivateKey.generate()
    (lab.folder / "locked.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    assert lab.seal("--sign", lab.folder / "locked.pem") == 1
    assert lab.said.count("\n") == 1


def test_without_the_library(lab, monkeypatch):
    lab.seal("--sign", lab.private)
    monkeypatch.setitem(sys.modules, "securesystemslib", None)
    for code in (lab.verify("--public-key", lab.public), lab.seal("--sign", lab.private)):
        assert code == 2
        assert lab.said == "cannot run: signatures need the Python package securesystemslib[crypto]: install it\n"
    assert lab.verify() == 0
