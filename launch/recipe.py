"""The launch part of an artifact file: flags with their reasons, declarations, refusals, expectations."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.engine_flags import table
from qualify.errors import CannotRun, Rejected

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag of a recipe."""

    flag: str
    value: Any
    reason: str
    #: environment variable that overrides the value; empty where none does
    variable: str = ""
    #: a required value: giving another one is an error
    fixed: bool = False
    #: architectures and tensor-parallel sizes that it holds for; empty means all
    targets: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    #: names of the recipe's models that it holds for; empty means all
    models: tuple[str, ...] = ()
    #: all-to-all backends that it holds for, ``none`` among them; empty means all
    a2a: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AllToAll:
    """A backend that moves tokens to the ranks that own their experts, and where it can."""

    name: str
    targets: tuple[str, ...]
    tp: tuple[int, ...]
    reason: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """One named size of a recipe, and the numbers of ``config.json`` by which a checkpoint is known to have it."""

    name: str
    config: dict[str, int]

    def matches(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` has these numbers; a count that is absent or null is 0."""
        return all((config.get(key) or 0) == value for key, value in self.config.items())

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(f'{key} {value}' for key, value in self.config.items())})"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What only the operator can say, handed to the engine as an override of the model's config."""

    variable: str
    model_override: str
    values: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one artifact is launched."""

    artifact: str
    targets: dict[str, str]
    settings: tuple[Setting, ...]
    declarations: tuple[Declaration, ...]
    #: flag -> why this artifact refuses it
    refused: dict[str, str]
    #: field of ``/server_info`` -> value it must have besides the flags
    expect: dict[str, Any]
    #: the sizes that a checkpoint must have one of; empty where every size is launched alike
    models: tuple[Model, ...] = ()
    #: all-to-all backends that the routed experts may be served with, beside none
    all_to_all: tuple[AllToAll, ...] = ()


def load(artifact: str, folder: Path | None = None) -> Recipe:
    """Read ``recipes/<artifact>.toml``.

    Raises Rejected for an artifact without a recipe, CannotRun where the file is unusable: our file is wrong then.
    """
    folder = folder or RECIPES
    path = folder / f"{artifact}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.toml"))) or "none"
        raise Rejected(f"artifact {artifact!r} is unknown; recipes/ has {known}")
    try:
        raw = tomllib.loads(path.read_text())
        launch = raw.get("launch")
        if launch is None:
            raise Rejected(f"{artifact} cannot be launched yet: recipes/{path.name} has no [launch] part")
        recipe = Recipe(
            raw["artifact"],
            {name: target["status"] for name, target in raw["targets"].items()},
            tuple(
                Setting(**item | {name: tuple(item.get(name, ())) for name in ("targets", "tp", "models", "a2a")})
                for item in launch["flags"]
            ),
            tuple(Declaration(**{**item, "values": tuple(item["values"])}) for item in launch.get("declarations", ())),
            {item["name"]: item["reason"] for item in launch.get("refused", ())},
            launch.get("expect", {}),
            tuple(Model(item["name"], item["config"]) for item in launch.get("models", ())),
            tuple(
                AllToAll(**item | {name: tuple(item.get(name, ())) for name in ("targets", "tp", "models")})
                for item in launch.get("all_to_all", ())
            ),
        )
        for setting in recipe.settings:
            if table()[setting.flag].name != setting.flag or not setting.reason:
                raise ValueError(f"{setting.flag}: not the engine's first spelling, or without a reason")
            if unknown := set(setting.targets) - set(recipe.targets):
                raise ValueError(f"{setting.flag}: no target {', '.join(sorted(unknown))}")
            if unknown := set(setting.models) - {model.name for model in recipe.models}:
                raise ValueError(f"{setting.flag}: no model {', '.join(sorted(unknown))}")
            if unknown := set(setting.a2a) - {"none", *(entry.name for entry in recipe.all_to_all)}:
                raise ValueError(f"{setting.flag}: no all-to-all backend {', '.join(sorted(unknown))}")
        for name in recipe.refused:
            if table()[name].name != name:
                raise ValueError(f"{name}: not the engine's first spelling")
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRun(f"recipes/{path.name} is not a usable artifact file: {error}") from None
    return recipe
