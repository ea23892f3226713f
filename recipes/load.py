"""A recipe's file and command-line overrides -> a checked `Recipe`, and back to text."""

import difflib
import json
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.problems import explain
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.text import dump, parse

LAUNCHING = "accelerate"  # the folder of what is no recipe, but says how processes are launched
LARGEST = 1 << 20  # bytes; a recipe is a page of text


def load_recipe(path_or_name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a file, or a shipped recipe by its stem. Overrides look like `optim.lr=1e-4`.

    Raises UserError in one line: where, what was given, what is allowed.
    """
    text, source = read_text(path_or_name)
    data = parse(text, source)
    if data is None:
        raise UserError(f"{source} is empty; a recipe needs at least name and target.model")
    if not isinstance(data, dict):
        raise UserError(f"{source}: a recipe is made of `key: value` lines, this is {kind(data)}")
    overridden = [apply_override(data, override) for override in overrides]
    return check(data, source, overridden)


def check(data: dict[str, Any], source: str, overridden: Sequence[str] = ()) -> Recipe:
    """Plain data -> Recipe."""
    try:
        text = json.dumps(data)
        bad = no_unicode(data)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: values are text, numbers, lists and keys ({error})") from error
    if bad is not None:
        where = "command line" if bad in overridden else source
        raise UserError(f"{where}: {bad}: no valid text, it holds half a surrogate pair")
    try:
        # JSON rules, strictly: a list may become a tuple; "2", 2.0 and true are no whole numbers.
        return Recipe.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = explain(error, data, Recipe)
        key, what = problems[0]
        where = "command line" if key in overridden else source
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{where}: {key + ': ' if key else ''}{what}{more}") from error


def no_unicode(value: Any, path: str = "") -> str | None:
    """The dotted key of the first text that UTF-8 cannot hold, if there is one."""
    if isinstance(value, str):
        return path if value != value.encode("utf-8", "replace").decode() else None
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            shown = str(key).encode("utf-8", "backslashreplace").decode()
            parts += [(part, f"{path}.{shown}" if path else shown) for part in (key, child)]
    elif isinstance(value, list):
        parts = [(child, path) for child in value]
    return next((at for part, where in parts if (at := no_unicode(part, where)) is not None), None)


def override_recipe(data: dict[str, Any], overrides: Sequence[str], *, source: str) -> Recipe:
    """A recipe that was kept as plain data (in a checkpoint, say), with changes."""
    data = dict(data)
    return check(data, source, [apply_override(data, override) for override in overrides])


def read_text(path_or_name: str) -> tuple[str, str]:
    """The recipe's text, and how to call it in messages."""
    path = user_path(path_or_name)
    try:
        if path.is_dir():
            raise UserError(f"{path_or_name} is a folder; give a recipe's .yaml file or name")
        if path.exists():
            return read_file(path), path_or_name
    except OSError as error:
        raise UserError(f"{path_or_name}: cannot be read ({error.strerror})") from error
    return read_shipped(path_or_name), path_or_name


def read_file(path: Path) -> str:
    """A recipe's bytes as text."""
    with open(path, "rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise UserError(f"{path} is over 1 MB; a recipe is a short YAML file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; a recipe is a YAML file") from error


def read_shipped(name: str) -> str:
    """A shipped recipe's text."""
    shipped = shipped_recipes()
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if name in shipped:
        return shipped[name].read_text(encoding="utf-8")
    close = difflib.get_close_matches(Path(stem).name, shipped, n=1)
    mend = f"did you mean {close[0]}?" if close else f"shipped: {', '.join(sorted(shipped))}"
    what = "file" if "/" in name or name != stem else "recipe or file"
    raise UserError(f"no {what} {name}; {mend}")


def shipped_recipes() -> dict[str, Traversable]:
    """Every recipe that comes with draftsmith, by its stem."""
    found: dict[str, Traversable] = {}
    folders = [resources.files("draftsmith.recipes")]
    while folders:
        for entry in folders.pop().iterdir():
            if entry.is_dir():
                folders += [entry] if entry.name != LAUNCHING else []
            elif entry.name.endswith(".yaml"):
                found[entry.name.removesuffix(".yaml")] = entry
    return found


def launching(name: str) -> Path:
    """A config file of `accelerate launch`: a shipped one's stem, or a file. Raises UserError."""
    folder = Path(str(resources.files("draftsmith.recipes"))) / LAUNCHING
    shipped = {path.stem: path for path in folder.glob("*.yaml")}
    path = shipped.get(name, user_path(name))
    if not path.is_file():
        raise UserError(
            f"--accelerate: {name} is neither a file nor one of {', '.join(sorted(shipped))}"
        )
    return path


def apply_override(data: dict[str, Any], override: str) -> str:
    """Set one dotted key in place; returns the key."""
    key, equals, text = override.partition("=")
    steps = key.split(".")
    if not equals or not all(step.isidentifier() for step in steps):
        raise UserError(f"override {override!r}: write KEY=VALUE, for example optim.lr=1e-4")
    if not text.strip():
        raise UserError(f"override {override!r} has no value; write {key}=null for none")
    value = parse(text, f"override {override!r}")
    node = data
    for step in steps[:-1]:
        child = node.get(step)
        if child is not None and not isinstance(child, dict):
            raise UserError(f"override {override!r}: {step} is {kind(child)}, it has no keys below")
        node[step] = node = dict(child or {})  # a copy: YAML aliases may share one mapping
    node[steps[-1]] = value
    return key


def kind(value: Any) -> str:
    """What a YAML value is, in words."""
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def dump_recipe(recipe: Recipe) -> str:
    """YAML text with every knob, which `load_recipe` reads back to the same recipe."""
    return dump(recipe.model_dump(mode="json"))
