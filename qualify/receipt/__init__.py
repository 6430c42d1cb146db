"""Receipts: what one qualification showed, as an in-toto Statement v1 with the predicate test-result v0.1.

``build`` makes a receipt from a run directory, ``seal`` and ``verify`` are the commands; docs/receipts.md says what is
in one and what it does not prove. Everything but signatures works with the standard library alone.
"""

#: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
STATEMENT = "https://in-toto.io/Statement/v1"
#: https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
#: the extension field of the predicate; the framework asks for a name that collides with nobody's
EXTENSION = "horizonImages"
SCHEMA = "horizon-images/receipt/v1"
