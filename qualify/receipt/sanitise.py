"""Nothing private in a receipt: every key and string is held against what must not be there, and one hit refuses it.

Fields with a fixed form (digests, revisions, times) are exempt by name and form; everything else is searched. Names of
this host and of its users are looked up here; a run on another host needs them given (``--private``).
"""

from __future__ import annotations

import contextlib
import fnmatch
import getpass
import ipaddress
import itertools
import os
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from qualify.receipt import PREDICATE, STATEMENT

#: folders of the container that sentences may name
FOLDERS = ("/opt/horizon", "/models", "/var/cache/horizon", "/run/secrets", "/usr/lib", "/lib")
#: paths of the engine's HTTP interface
ENDPOINTS = ("/health", "/health_generate", "/server_info", "/model_info", "/metrics", "/generate", "/v1")
#: names that say nothing about anybody
COMMON = {"localhost", "localdomain", "root", "user", "users", "nobody", "horizon", "admin", "none", "test", "operator"}

_FIXED = {
    "*.digest.sha256": re.compile(r"[0-9a-f]{64}\Z"),
    "*_sha256": re.compile(r"[0-9a-f]{64}\Z"),
    "*.checkpoint.identity.*": re.compile(r"[0-9a-f]{64}\Z"),
    "*.checkpoint.revision": re.compile(r"[0-9a-f]{40}\Z"),
    "*.diffIds[[]*": re.compile(r"sha256:[0-9a-f]{64}\Z"),
    "_type": re.compile(re.escape(STATEMENT) + r"\Z"),
    "predicateType": re.compile(re.escape(PREDICATE) + r"\Z"),
}
_PATH = re.compile(r"(?<![\w.])/[\w.~@%+-][^\s\"'`,;:()\[\]{}<>|=]*")
_HOMES = re.compile(r"(?:^|/)(?:home|root|Users)/|~\w*/|(?:^|[\s/])\.\./|\b[A-Za-z]:\\|\\\\\w")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^\s/:\"']*|\[[^\]]*\])")
_ADDRESS = re.compile(
    r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d)"
    r"|(?<![\w.:])[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?![\w:])"
)
_MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}(?![\w:-])")
#: names in the DNS, and those that clouds make of addresses; other host names look like any word
_DOMAIN = re.compile(
    r"(?i)\b[a-z0-9-]+\.(?:[a-z0-9-]+\.)*(?:internal|intranet|lan|corp|com|net|org|edu)\b|\bip(?:-\d{1,3}){4}\b"
)
_MAIL = re.compile(r"[^\s@]+@[^\s@]+")
_TOKENS = re.compile(
    r"\b(?:hf|gh[oprsu]|npm|dckr_pat|api|key|tok)_[A-Za-z0-9]{8,}|\bgithub_pat_\w+|\b(?:sk|pk|rk)[-_][A-Za-z0-9_-]{8,}"
    r"|\bnvapi-\S{8,}|\bglpat-\S{8,}|\bxox[a-z]-\S+|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]{8,}"
    r"|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b|-----BEGIN|\bssh-(?:rsa|ed25519)\b|\bBearer\s+\S|\bBasic\s+[A-Za-z0-9+/=]{8,}"
)
_SECRET = (
    r"(?:api[-_ ]?key|access[-_ ]?key|secret|password|passwd|credentials?|authorization"
    r"|(?:auth|access|api|hf|bearer)[-_ ]?token)"
)
_ASSIGNED = re.compile(rf"(?i){_SECRET}[\"']?\s*[=:]\s*\S")
#: a field of such a name holds none, whatever it looks like
_NAMED = re.compile(rf"(?i){_SECRET}\Z")
_RUN = re.compile(r"[A-Za-z0-9+/=]{20,}")
_LONG = re.compile(r"[A-Za-z0-9+/=_-]{40,}")


def names_here() -> set[str]:
    """Names of this host and of the user who seals."""
    host = {socket.gethostname(), os.environ.get("HOSTNAME", "")}
    users = {os.environ.get(key, "") for key in ("SUDO_USER", "LOGNAME", "USER")}
    with contextlib.suppress(KeyError, OSError):  # a uid without an entry
        users.add(getpass.getuser())
    return host | {name.partition(".")[0] for name in host} | users


def find(document: Any, private: Iterable[str] = ()) -> str | None:
    """The first field with anything private in it and what that is, never its content; None: nothing found.

    ``private``: host and user names to look for beside the patterns.
    """
    words = {word.lower() for word in private if len(word) > 1} - COMMON
    for where, text, is_key in _strings(document, ""):
        exempt = not is_key and any(
            fnmatch.fnmatchcase(where, pattern) and form.match(text) for pattern, form in _FIXED.items()
        )
        if not is_key and text and _NAMED.search(where):
            return f"{where[:200]} holds what looks like a token or a key"
        if not exempt and (found := defect(text, words)):
            return f"{f'a key of {where}' if is_key else where[:200]} holds {found}"
    return None


def redact(text: str) -> str:
    """A sentence that :func:`find` accepts on this host: ``[...]`` stands for every word that it would refuse."""
    names = names_here()
    words = ["[...]" if find([word], names) else word for word in text.split()]
    text = " ".join(words)
    return "the reason holds something private: see logs/" if find([text], names) else text


def _strings(value: Any, where: str) -> Iterator[tuple[str, str, bool]]:
    if isinstance(value, str):
        yield where, value, False
    elif isinstance(value, dict):
        for key, item in value.items():
            yield where or "the document", key, True
            yield from _strings(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for n, item in enumerate(value):
            yield from _strings(item, f"{where}[{n}]")


def defect(text: str, words: set[str] = frozenset()) -> str | None:
    """What kind of private thing a string holds; None: nothing found. ``words`` are in lower case."""
    if not text.isascii() or not text.isprintable():
        return "characters that are not printable ASCII"
    lower = text.lower()
    if any(re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", lower) for word in words):
        return "the name of a host or a user"
    if _TOKENS.search(text) or _ASSIGNED.search(text) or _random(text):
        return "what looks like a token or a key"
    if _MAIL.search(text):
        return "an e-mail address or user@host"
    if _MAC.search(text) or any(not _loopback(match[0]) for match in _ADDRESS.finditer(text)):
        return "a network address"
    if any(not _loopback(match[1]) for match in _URL.finditer(text)):
        return "a URL"
    if _DOMAIN.search(text):
        return "the name of a host or a user"
    rest = _URL.sub("", text)
    if _HOMES.search(rest) or any(not _known(match[0]) for match in _PATH.finditer(rest)):
        return "a path that is not one of the container's"
    return None


def _known(path: str) -> bool:
    path = path.rstrip(".")
    return any(path == folder or path.startswith(f"{folder}/") for folder in (*FOLDERS, *ENDPOINTS))


def _loopback(text: str) -> bool:
    """Whether a host is this machine itself; a string of digits and dots that is no address is harmless too."""
    if text == "localhost":
        return True
    try:
        return ipaddress.ip_address(text.strip("[].").removesuffix(":")).is_loopback
    except ValueError:
        # Four numbers that are no address (999.1.1.1) or times like 21:00:00; a host name is neither.
        return bool(re.fullmatch(r"[0-9A-Fa-f:.]*", text)) and not text.isalpha()


def _random(text: str) -> bool:
    """Whether a long run of letters and digits looks like no word: hex, many digits, or kinds that keep changing.

    Class names (CompressedTensorsW8A8Fp8MoEMethod) change the kind of character at less than half of their places,
    random base64 at about 62 %.
    """
    for run in (match[0] for match in _RUN.finditer(text)):
        digits = sum(char.isdigit() for char in run)
        if digits == len(run) < 24 or not digits:  # a number (2**64 has 20 digits), or words
            continue
        if _changes(run) >= 0.5 or digits >= max(6, len(run) // 5) or re.fullmatch(r"[0-9a-fA-F]+", run):
            return True
    long = [match[0] for match in _LONG.finditer(text)]
    return any(_changes(run) >= 0.45 and sum(char.isdigit() for char in run) >= 6 for run in long)


def _changes(run: str) -> float:
    """The fraction of neighbours of different kinds: lower case, upper case, digit, other."""
    kinds = [0 if char.islower() else 1 if char.isupper() else 2 if char.isdigit() else 3 for char in run]
    return sum(a != b for a, b in itertools.pairwise(kinds)) / (len(run) - 1)
