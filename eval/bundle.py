"""What `custom_generate/` of a drafter's repository holds: the decoding loop and all that it
imports, as files side by side, which is how transformers loads code from the Hub.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from draftsmith.drafters.methods import METHODS
from draftsmith.recipes.provenance import version

ENTRY, FOLDER = "draftsmith.eval.remote", "custom_generate"
TABLE = "draftsmith.drafters.methods"  # names every kind of drafter; one is enough
PREFIX = "draftsmith."
REQUIREMENTS = ("pydantic>=2.9", "safetensors>=0.6", "torch>=2.11", "transformers>=5.15")
IMPORT = re.compile(r"^([ \t]*)from draftsmith\.([\w.]+) import\b", re.MULTILINE)


def bundle(kind: str, repository: str) -> dict[str, str]:
    """Texts by file name, for a drafter of this kind in this repository."""
    texts = {module: source(module, kind) for module in closure(kind)}
    found = {file_name(module): flattened(module, text) for module, text in texts.items()}
    entry = file_name(ENTRY)
    found[entry] = found[entry].replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}")
    return {**found, "requirements.txt": "\n".join(REQUIREMENTS) + "\n"}


def closure(kind: str) -> list[str]:
    """The entry and every module that it needs, in the order in which they are met."""
    met = [ENTRY]
    for module in met:  # grows while it is read
        met += [one for one in imported(source(module, kind)) if one not in met]
    return met


def source(module: str, kind: str) -> str:
    """A module's text; the table of methods without the other kinds."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    text = Path(spec.origin).read_text(encoding="utf-8")
    return without_others(text, kind) if module == TABLE else text


def without_others(text: str, kind: str) -> str:
    """The table of methods for one kind: neither the others' lines nor their imports."""
    others = {method.__name__: name for name, method in METHODS.items() if name != kind}
    patterns = [rf"from draftsmith\.[\w.]+ import {cls}" for cls in others]
    patterns += [rf'    "{name}": {cls},' for cls, name in others.items()]
    gone = re.compile("|".join(patterns))
    return "\n".join(line for line in text.split("\n") if gone.fullmatch(line) is None)


def imported(text: str) -> Iterator[str]:
    """The modules of draftsmith that a text imports, wherever in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX):
            yield str(node.module)


def file_name(module: str) -> str:
    """`drafters/tree.py` lies as `drafters_tree.py`; the entry has the name that is asked for."""
    if module == ENTRY:
        return "generate.py"
    return module.removeprefix(PREFIX).replace(".", "_") + ".py"


def flattened(module: str, text: str) -> str:
    """With imports of the neighbours in the same folder."""
    found = IMPORT.sub(lambda hit: f"{hit[1]}from .{hit[2].replace('.', '_')} import", text)
    origin = f"# {module} of {version('draftsmith')} (Apache-2.0); only its imports are changed."
    return f"{origin}\n{found}"
