"""From a recipe, the environment and pass-through arguments to one plan: what the engine is started with, and why."""

from __future__ import annotations

import ipaddress
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import all_to_all, arguments, refused
from launch.engine_flags import JSON, Flag
from launch.models import choose
from launch.recipe import Recipe, Setting
from qualify.errors import Rejected

#: Variables of every recipe that stand for a flag; a recipe's own settings add theirs.
VARIABLES = {
    "MODEL_DIR": "--model-path",
    "PORT": "--port",
    "HOST": "--host",
    "SERVED_MODEL_NAME": "--served-model-name",
    "A2A": all_to_all.FLAG,
}
OVERRIDES = "--json-model-override-args"
#: Numbers that make sense, smallest and largest.
RANGES = {
    "--port": (1, 65535),
    "--mem-fraction-static": (0.05, 0.99),
    "--context-length": (1, 1 << 40),
    "--max-running-requests": (1, 1 << 20),
    "--max-total-tokens": (1, 1 << 40),
    "--cuda-graph-max-bs-decode": (1, 1 << 20),
    "--tp-size": (1, 1024),
    "--ep-size": (1, 1024),
}
SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """One flag of a plan: its typed value, the words on the command line, and where it comes from."""

    flag: Flag
    value: Any
    words: tuple[str, ...]
    source: str


@dataclass(slots=True)
class Plan:
    """What will be started."""

    artifact: str
    target: str
    choices: dict[str, Choice]
    #: variable -> {"value", "said_by"}: what the operator vouches for
    declared: dict[str, dict[str, Any]]
    expect: dict[str, Any]
    uncatalogued: bool
    revision: str | None
    #: the recipe's model that this is the plan of; None where it names none
    model: str | None = None
    #: the server wants an API key; its value is not part of the plan while that is only printed
    keyed: bool = False
    key: str | None = field(repr=False, default=None)

    def value(self, name: str, default: Any = None) -> Any:
        """The typed value of a flag, by its first spelling."""
        return self.choices[name].value if name in self.choices else default

    @property
    def tp(self) -> int:
        return self.value("--tp-size", 1)

    @property
    def ep(self) -> int:
        return self.value("--ep-size", 1)

    def name(self, name: str, source: str) -> None:
        """Serve under this name."""
        _take(self.choices, "--served-model-name", name, source)

    @property
    def arguments(self) -> list[str]:
        """The engine's arguments; the API key is not among them."""
        return [word for choice in self.choices.values() for word in choice.words]

    @property
    def command(self) -> str:
        """One shell-quoted line that starts the same engine without supervision; the API key is a placeholder."""
        return shlex.join(["sglang", "serve", *self.arguments, *(["--api-key", "<API_KEY>"] if self.keyed else [])])

    def as_dict(self) -> dict[str, Any]:
        """The plan for a machine: no key in it."""
        return {
            "artifact": self.artifact,
            "target": self.target,
            "model": self.model,
            "flags": {name: {"value": c.value, "source": c.source} for name, c in self.choices.items()},
            "declared": self.declared,
            "expect": self.expect,
            "uncatalogued": self.uncatalogued,
            "revision": self.revision,
            "api_key": self.keyed,
            "command": self.command,
        }


def build(
    recipe: Recipe, environment: Mapping[str, str], passed: Sequence[str], target: str, placeholders: bool = False
) -> Plan:
    """Make the plan for one target (sm90, ...).

    An unset variable and an empty one are the same. ``placeholders`` puts ``<NAME>`` where the operator has
    not said what only the operator can say, and reads no file but the ``config.json`` that says which of the recipe's
    models it is. Raises Rejected with what to change.
    """
    environment = {name: value.strip() for name, value in environment.items() if value.strip()}
    arguments.refuse_remote_code(passed, environment)
    refused.environment(environment)
    if target not in recipe.targets:
        raise Rejected(f"target {target}: {recipe.artifact} lists {', '.join(recipe.targets)}")
    given = arguments.parse(passed)
    asked = _asked(recipe, environment, given)
    choices: dict[str, Choice] = {}
    path = asked.get("--model-path")
    if path is None and not placeholders:
        raise Rejected("MODEL_DIR is not set: say which checkpoint to serve (the folder with config.json)")
    _take(choices, "--model-path", *(path or ("<MODEL_DIR>", "MODEL_DIR")))
    model = choose(recipe, environment.get("MODEL"), path and path[0], placeholders)
    listen, key = _listening(asked, environment, placeholders)
    _take(choices, "--host", *listen)
    _take(choices, "--port", *asked.get("--port", (30000, "default")))
    declared, override = _declarations(recipe, environment, placeholders)
    if OVERRIDES in given:  # the plan's own flag
        raise Rejected(f"{OVERRIDES}: the config is served as inspected; what it lacks is declared by variables")
    if override:
        _take(choices, OVERRIDES, override, "declared by the operator")
    settings = [s for s in recipe.settings if _holds(s, target, model)]
    tp = asked.get("--tp-size", (next((s.value for s in settings if s.flag == "--tp-size"), 1), ""))[0]
    a2a = all_to_all.settle(recipe, asked, target, model, tp)
    for setting in settings:
        if (setting.tp and tp not in setting.tp) or (setting.a2a and a2a not in setting.a2a):
            continue
        _take(choices, setting.flag, *asked.get(setting.flag, (setting.value, setting.reason)))
        if setting.fixed and choices[setting.flag].value != setting.value:
            raise Rejected(
                f"{setting.flag} {choices[setting.flag].value}: {recipe.artifact} needs {setting.value} on {target}: "
                f"{setting.reason}"
            )
    for name, (value, source) in asked.items():
        if name in recipe.refused:
            raise Rejected(f"{name}: {recipe.refused[name]}")
        if name not in choices:
            _take(choices, name, value, source)
    for name, (smallest, largest) in RANGES.items():
        if name in choices and not smallest <= choices[name].value <= largest:
            raise Rejected(f"{name} {choices[name].value}: must be between {smallest} and {largest:,}")
    all_to_all.check(a2a, choices)
    made = Plan(
        recipe.artifact, target, choices, declared, recipe.expect, _yes(environment, "UNCATALOGUED"),
        environment.get("REVISION"), model, bool(environment.get("API_KEY_FILE")), key,
    )  # fmt: skip
    if made.tp % made.ep:
        raise Rejected(f"TP={made.tp} EP={made.ep}: EP divides TP")
    return made


def _holds(setting: Setting, target: str, model: str | None) -> bool:
    return (not setting.targets or target in setting.targets) and (not setting.models or model in setting.models)


def _asked(recipe: Recipe, environment: Mapping[str, str], given: dict) -> dict[str, tuple[Any, str]]:
    """{flag: (value, source)} of variables and arguments together."""
    variables = VARIABLES | {s.variable: s.flag for s in recipe.settings if s.variable}
    asked: dict[str, tuple[Any, str]] = {}
    for variable, name in variables.items():
        if variable in environment:
            asked[name] = (arguments.lookup(name).value(environment[variable]), f"environment {variable}")
    for name, value in given.items():
        if name in asked and asked[name][0] != value:
            raise Rejected(f"{name} {value} contradicts {asked[name][1]}={asked[name][0]}: give one of them")
        asked[name] = (value, "argument")
    return asked


def _take(choices: dict[str, Choice], name: str, value: Any, source: str) -> None:
    flag = arguments.lookup(name)
    if flag.arity == "none":
        words = [flag.name] if value else [name for name in flag.spellings if name.startswith("--no-")]
    elif flag.type in JSON:
        words = [flag.name, json.dumps(value)]
    elif isinstance(value, list):
        words = [flag.name, *map(str, value)]
    else:
        words = [flag.name] if value is None else [flag.name, str(value)]
    choices[name] = Choice(flag, value, tuple(words), source)


def _declarations(
    recipe: Recipe, environment: Mapping[str, str], placeholders: bool
) -> tuple[dict[str, dict[str, Any]], str]:
    """What the operator declares, and the engine's config override that says it."""
    declared, parts = {}, []
    for item in recipe.declarations:
        told = environment.get(item.variable)
        choice = " or ".join(map(str, item.values))
        if told is None:
            if not placeholders:
                raise Rejected(f"{item.variable} is not set: {item.reason}; declare {choice}")
            parts.append(f'"{item.model_override}": <{item.variable}>')
            continue
        if told not in map(str, item.values):
            raise Rejected(f"{item.variable}={told}: must be {choice}")
        said_by = environment.get(f"{item.variable}_SAID_BY", f"operator, by environment {item.variable}")
        declared[item.variable] = {"value": int(told), "said_by": said_by, "model_override": item.model_override}
        parts.append(f'"{item.model_override}": {told}')
    return declared, "{" + ", ".join(parts) + "}" if parts else ""


def _listening(
    asked: dict[str, tuple[Any, str]], environment: Mapping[str, str], placeholders: bool
) -> tuple[tuple[str, str], str | None]:
    """Where to listen, and the API key: beyond loopback only with a key, or where none is said to be wanted."""
    open_to_all = _yes(environment, "ALLOW_NO_KEY")
    file = environment.get("API_KEY_FILE")
    if file and open_to_all:
        raise Rejected("API_KEY_FILE and ALLOW_NO_KEY=1 contradict: give one of them")
    key = read_key(file) if file and not placeholders else None
    reach = bool(file) or open_to_all
    default = ("0.0.0.0", "API_KEY_FILE" if file else "ALLOW_NO_KEY=1") if reach else ("127.0.0.1", "no API_KEY_FILE")
    host, source = asked.get("--host", default)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise Rejected(f"--host {host}: give an IP address") from None
    if not address.is_loopback and not reach:
        raise Rejected(f"--host {host} without an API key: set API_KEY_FILE, or ALLOW_NO_KEY=1 to serve everybody")
    return (host, source), key


def read_key(file: str) -> str:
    """The API key in a file. Raises Rejected where it is no usable key; the message never holds its content."""
    try:
        key = Path(file).read_text(encoding="ascii").rstrip("\r\n")
    except IsADirectoryError:
        raise Rejected(
            f"API_KEY_FILE={file}: is a folder, which Docker makes where the mounted file is missing"
        ) from None
    except OSError as error:
        raise Rejected(f"API_KEY_FILE={file}: {error.strerror}; it must be readable by uid 10001 or gid 0") from None
    except UnicodeDecodeError:
        key = ""
    if len(key) < SHORTEST_KEY or not all(" " < character < "\x7f" and character not in "\"'\\" for character in key):
        raise Rejected(
            f"API_KEY_FILE={file}: must hold one line of at least {SHORTEST_KEY} printable ASCII characters, no "
            "spaces, quotes or backslashes (openssl rand -hex 32)"
        )
    return key


def _yes(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in ("0", "1"):
        raise Rejected(f"{name}={value}: give 1, or leave it out")
    return value == "1"
