"""Which of a recipe's named models a checkpoint is: by the numbers of its config.json, never by its folder's name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.recipe import Recipe
from qualify.checkpoint import strictjson
from qualify.errors import Rejected


def recognise(recipe: Recipe, config: Mapping[str, Any], planned: str | None = None) -> str | None:
    """The name of the model that has this ``config.json``; None where the recipe names none.

    Raises Rejected where it is none of them, or another than the one that was ``planned``.
    """
    if not recipe.models:
        return None
    found = next((model for model in recipe.models if model.matches(config)), None)
    if found is None:
        numbers = ", ".join(f"{key} {config.get(key)}" for key in recipe.models[0].config)
        raise Rejected(
            f"config.json ({numbers}) is of no size that {recipe.artifact} has a plan for: "
            f"{', '.join(map(str, recipe.models))}"
        )
    if planned not in (None, found.name):
        raise Rejected(
            f"the plan is for {planned}, and config.json is that of {found}: leave MODEL out, and let MODEL_DIR be the "
            "folder with config.json"
        )
    return found.name


def choose(recipe: Recipe, said: str | None, folder: str | None, printing: bool) -> str | None:
    """The model to plan for: what the checkpoint is, else what MODEL says, else the recipe's first.

    A checkpoint that cannot be told is left to its inspection, which says more about it, and to :func:`recognise` after
    it: both come before anything is started. A printed plan has neither, and is refused here. Raises Rejected.
    """
    names = [model.name for model in recipe.models]
    if said is not None and said not in names:
        raise Rejected(f"MODEL={said}: " + (f"must be one of {', '.join(names)}" if names else "leave it out here"))
    if not names:
        return None
    config = _config(folder) if folder else None
    if config is not None and (printing or any(model.matches(config) for model in recipe.models)):
        return recognise(recipe, config, said)
    if said is None and folder and printing:
        raise Rejected(f"{folder} has no usable config.json to read the size from: set MODEL to {' or '.join(names)}")
    return said or names[0]


def _config(folder: str) -> dict[str, Any] | None:
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            config, _ = strictjson.parse(file.read(strictjson.MAX_BYTES))
    except (OSError, strictjson.JsonDefect):
        return None
    return config if isinstance(config, dict) else None
