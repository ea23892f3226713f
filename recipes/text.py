"""YAML text <-> plain data, without YAML 1.1's traps.

`3e-4` is a number, `on`, `yes` and `2026-01-31` are text, and a key given twice is an error.
"""

import re
from typing import Any

import yaml
from yaml.reader import ReaderError

from draftsmith.recipes.errors import UserError

# YAML 1.2's core types. PyYAML's own (1.1) reads `3e-4` as text, `on` as true, `1:30` as 90 and
# `010` as 8.
CORE_TYPES: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"(?:[-+]?(?:[0-9]*\.[0-9]+|[0-9]+\.)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|nan))$",
        "-+.0123456789",
    ),
)


class RecipeLoader(yaml.SafeLoader):
    """Reads core types only and refuses a key given twice."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  PyYAML's own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """PyYAML keeps the last of two equal keys, without a word."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            at = key_node.start_mark
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"a key is text, not {key!r}", at)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key} is given twice", at)
            seen.add(key)
        return super().construct_mapping(node, deep)


class RecipeDumper(yaml.SafeDumper):
    """Quotes whatever either YAML version would not read back as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(found) for first, found in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


def flow_list(dumper: RecipeDumper, values: list[Any]) -> yaml.Node:
    """A list on one line; blocks stay on lines of their own."""
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=True)


RecipeDumper.add_representer(list, flow_list)
for tag, pattern, starts in CORE_TYPES:
    first = ["" if character == "\0" else character for character in starts]
    RecipeLoader.add_implicit_resolver(tag, re.compile(pattern), first)
    RecipeDumper.add_implicit_resolver(tag, re.compile(pattern), first)


def parse(text: str, source: str) -> Any:
    """YAML text as plain data. Raises UserError naming the source, line and column."""
    try:
        return yaml.load(text, RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        raise UserError(f"{source}{where}: bad YAML ({error.problem})") from error
    except ReaderError as error:
        raise UserError(
            f"{source}: no valid text, its character {error.position + 1} "
            f"(U+{error.character:04X}) is not allowed in YAML"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: bad YAML ({' '.join(str(error).split())})") from error


def dump(data: dict[str, Any]) -> str:
    """Plain data as YAML text that `parse` reads back to the same data."""
    return yaml.dump(
        data, Dumper=RecipeDumper, sort_keys=False, default_flow_style=False, allow_unicode=True
    )
