"""What is wrong with a recipe, in one line: the key, what was given, what is allowed."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError

# Words that people bring from other tools, and what they are called here.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "warmup": "optim.warmup_steps",
    "max_grad_norm": "optim.clip",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "gradient_accumulation_steps": "train.rows_per_micro_batch",
    "per_device_train_batch_size": "train.rows_per_micro_batch",
    "report_to": "train.trackers",
    "base_model": "target.model",
    "model_name_or_path": "target.model",
    "verifier": "target.model",
    "output_dir": "runs",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "num_heads": "drafter.heads",
    "load_in_4bit": "target.load_in",
    "load_in_8bit": "target.load_in",
    "lora_r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "medusa_heads_coefficient": "adapter.head_share",
    "medusa_scheduler": "adapter.ramp",
    "medusa_num_heads": "drafter.heads",
}
NUMBERS = {"integer": "a whole number", "number": "a number"}
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}


class Vocabulary:
    """Every key of a recipe, read off the schema."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.root = model.model_json_schema()
        self.definitions: dict[str, Any] = self.root.get("$defs", {})

    def resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        """The node that a reference points to."""
        while "$ref" in node:
            node = self.definitions[node["$ref"].removeprefix("#/$defs/")]
        return node

    def choices(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        """The alternatives of a union; a plain node is its own only one."""
        node = self.resolve(node)
        found = node.get("oneOf") or node.get("anyOf") or [node]
        return [self.resolve(choice) for choice in found]

    def keys(self, node: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The keys of a block (of all its kinds, where it has several)."""
        return {
            key: child
            for choice in self.choices(node)
            for key, child in choice.get("properties", {}).items()
        }

    def walk(self, location: tuple[int | str, ...]) -> tuple[list[str], dict[str, Any]]:
        """Follow pydantic's location as far as it names keys; the tag of a union chooses a kind."""
        path: list[str] = []
        node = self.root
        for step in location:
            children = self.keys(node)
            if isinstance(step, str) and step in children:
                path, node = [*path, step], children[step]
            else:
                node = next((one for one in self.choices(node) if is_kind(one, step)), node)
        return path, node

    def paths(self, node: dict[str, Any], prefix: str = "") -> Iterator[str]:
        """Every dotted key below a node."""
        for key, child in self.keys(node).items():
            if self.keys(child):
                if any(choice.get("type") == "null" for choice in self.choices(child)):
                    yield f"{prefix}{key}"  # a block that may be left out as a whole
                yield from self.paths(child, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    def allowed(self, node: dict[str, Any]) -> str:
        """What a value may be, in words."""
        return " or ".join(dict.fromkeys(self.words(choice) for choice in self.choices(node)))

    def words(self, node: dict[str, Any]) -> str:
        """One alternative, in words."""
        if "enum" in node or "const" in node:
            values = node.get("enum") or [node["const"]]
            return "one of " + ", ".join(map(str, values)) if len(values) > 1 else str(values[0])
        kind = node.get("type")
        if kind in NUMBERS:
            limits = [
                text.format(round_number(node[key])) for key, text in LIMITS.items() if key in node
            ]
            return " ".join([NUMBERS[kind], " and ".join(limits)]).strip()
        if kind == "array":
            items = node.get("prefixItems") or [node.get("items", {})]
            count = f"{len(items)} of " if "prefixItems" in node else ""
            return f"a list: {count}{self.allowed(items[0])}"
        if kind == "object":
            return "keys such as " + ", ".join(list(self.keys(node))[:3])
        if kind == "string" and "pattern" in node:
            return "text of letters, digits, dots, dashes and underscores"
        return {"boolean": "true or false", "null": "null", "string": "text"}.get(
            str(kind), "a value"
        )


def is_kind(node: dict[str, Any], tag: int | str) -> bool:
    """Whether a block is the kind of that name."""
    kind = node.get("properties", {}).get("kind", {})
    return tag in (kind.get("const"), *kind.get("enum", ()))


def round_number(value: float) -> str:
    """A limit for people: whole numbers in full, 0.0 as 0."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def likeness(given: str, known: str) -> float:
    """How much a given dotted key looks like a known one; the last word counts most."""
    given_head, _, given_leaf = given.rpartition(".")
    known_head, _, known_leaf = known.rpartition(".")
    leaf = SequenceMatcher(None, given_leaf, known_leaf).ratio()
    head = SequenceMatcher(None, given_head, known_head).ratio()
    return leaf + 0.3 * head if leaf >= 0.6 else 0.0


def nearest(given: str, vocabulary: Vocabulary) -> str | None:
    """The known key that a mistyped, misplaced or foreign one most likely means."""
    leaf = given.rpartition(".")[2]
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    known = list(vocabulary.paths(vocabulary.root))
    best = max(known, key=lambda path: likeness(given, path))
    return best if likeness(given, best) else None


def leaves(value: Any, path: str) -> list[str]:
    """The dotted keys below a value; a plain value is its own."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for key, child in value.items() for leaf in leaves(child, f"{path}.{key}")]


def unknown_key(
    path: list[str], step: str, value: Any, node: dict[str, Any], vocabulary: Vocabulary
) -> tuple[str, str]:
    """An unknown key or block below a node: the key, and a line about it."""
    given = leaves(value, ".".join([*path, step]))[0]
    # A misspelt block shows in its first key: `training: {lr: ...}` means optim.lr.
    right = nearest(given, vocabulary)
    allowed = f"allowed here: {', '.join(vocabulary.keys(node))}"
    mend = f"did you mean {right}?" if right and right != given else allowed
    return given, f"unknown key; {mend}"


def show(value: Any) -> str:
    """A given value, short."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    text = "null" if value is None else text
    return text if len(text) <= 60 else text[:57] + "..."


def one_problem(detail: Any, data: Any, vocabulary: Vocabulary) -> tuple[str, str]:
    """One of pydantic's errors: the key, and what is wrong with it."""
    location, kind, given = detail["loc"], detail["type"], detail["input"]
    path, node = vocabulary.walk(location)
    key = ".".join(path)
    if kind == "extra_forbidden":
        return unknown_key(path, str(location[-1]), given, node, vocabulary)
    if kind == "missing" and isinstance(location[-1], str):  # an int: a list is too short
        return key, f"missing; give {vocabulary.allowed(node)}"
    if kind == "string_too_short":
        return key, f"empty; give {vocabulary.allowed(node)}"
    if kind == "value_error":
        return key, str(detail["ctx"]["error"])
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = ", ".join(vocabulary.resolve(node)["discriminator"]["mapping"])
        kind_given = given.get("kind") if isinstance(given, dict) else given
        return f"{key}.kind", f"{show(kind_given)} is not allowed; allowed: {tags}"
    for step in path:  # a union's error shows one alternative; the whole value is clearer
        data = data[step] if isinstance(data, dict) and step in data else given
    quotes = " (in quotes)" if kind == "string_type" and isinstance(given, int | float) else ""
    return key, f"{show(data)} is not allowed; allowed: {vocabulary.allowed(node)}{quotes}"


def explain(error: ValidationError, data: Any, model: type[BaseModel]) -> list[tuple[str, str]]:
    """Every problem as (dotted key, what is wrong), unknown keys first."""
    vocabulary = Vocabulary(model)
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    found: dict[str, str] = {}
    for detail in details:
        key, text = one_problem(detail, data, vocabulary)
        found.setdefault(key, text)
    return list(found.items())
