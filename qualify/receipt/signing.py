"""Optional signatures: a receipt in a DSSE envelope, signed with a local key through securesystemslib.

The library is imported when a signature is asked for, and only then.
https://github.com/secure-systems-lab/dsse/blob/master/envelope.md
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected
from qualify.receipt.canonical import read

#: what in-toto puts into a DSSE envelope
PAYLOAD_TYPE = "application/vnd.in-toto+json"


def _library():
    try:
        import cryptography.hazmat.primitives.serialization as serialization
        from securesystemslib import dsse, signer
    except ImportError:
        raise CannotRun("signatures need the Python package securesystemslib[crypto]: install it") from None
    return serialization, dsse, signer


def sign(payload: bytes, key: Path) -> dict[str, Any]:
    """The envelope of a receipt, signed with an unencrypted PEM private key (Ed25519, ECDSA or RSA).

    Raises ``Rejected`` for a file that is no such key, ``CannotRun`` without securesystemslib.
    """
    serialization, dsse, signer = _library()
    try:
        private = serialization.load_pem_private_key(read(key, "--sign"), password=None)
        envelope = dsse.Envelope(payload, PAYLOAD_TYPE, {})
        envelope.sign(signer.CryptoSigner(private))
    except (TypeError, ValueError, _unsupported()) as error:
        raise Rejected(f"--sign is no unencrypted PEM private key: {str(error)[:100]}") from None
    return envelope.to_dict()


def payload(envelope: dict[str, Any]) -> bytes:
    """The receipt inside an envelope; standard library, proves nothing of the signature. Raises ``Rejected``."""
    signatures = envelope.get("signatures")
    well_formed = (
        set(envelope) == {"payload", "payloadType", "signatures"}
        and isinstance(signatures, list)
        and signatures
        and all(isinstance(item, dict) and isinstance(item.get("sig"), str) for item in signatures)
    )
    if not well_formed:
        raise Rejected("the envelope holds payload, payloadType and at least one signature, and nothing else")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise Rejected(f"the envelope's payloadType is not {PAYLOAD_TYPE}")
    try:
        return base64.b64decode(envelope["payload"], validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise Rejected("the envelope's payload is not base64") from None


def verify(envelope: dict[str, Any], key: Path) -> str:
    """The key ID of the signature that a PEM public key verifies.

    Raises ``Rejected`` where none does, ``CannotRun`` without securesystemslib.
    """
    serialization, dsse, signer = _library()
    try:
        public = signer.SSlibKey.from_crypto(serialization.load_pem_public_key(read(key, "--public-key")))
    except (TypeError, ValueError, _unsupported()) as error:
        raise Rejected(f"--public-key is no PEM public key: {str(error)[:100]}") from None
    from securesystemslib.exceptions import Error

    try:
        # A key ID is a hint: another tool's need not be this library's. The signature alone decides.
        entries = [{**item, "keyid": public.keyid} for item in envelope["signatures"]]
        for entry in entries:
            try:
                dsse.Envelope.from_dict({**envelope, "signatures": [entry]}).verify([public], 1)
                return public.keyid
            except Error:
                continue
    except (KeyError, TypeError, ValueError):
        pass
    raise Rejected("no signature of the envelope is by the key of --public-key")


def _unsupported() -> type[Exception]:
    from cryptography.exceptions import UnsupportedAlgorithm

    return UnsupportedAlgorithm
