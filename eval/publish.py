"""A drafter's repository: what lies in it, and that nothing lies in it which should not."""

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.drafters.builtin import BUILTINS
from draftsmith.drafters.checkpoint import CARD, META, write_json
from draftsmith.drafters.engine_files import Source
from draftsmith.drafters.hub_name import HubName, hub_name
from draftsmith.drafters.target import is_path, local_folder
from draftsmith.eval.bundle import FOLDER, bundle
from draftsmith.eval.exports import check_path, find_export, write_export
from draftsmith.eval.publish_card import Labels, card
from draftsmith.eval.publish_checks import TEXTS, check_clean, check_gain, check_trained, own_arms
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.load import dump_recipe

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
STARTER = "Apache-2.0 prompts written for draftsmith; the answers are the target's"
Files = list[tuple[str, Path]]  # path there, path here


@dataclass(frozen=True)
class Offer:
    """What the user says on the command line."""

    repository: str
    license: str | None
    data_license: str | None = None
    base_model: str | None = None
    exports: tuple[str, ...] = ()
    replace: tuple[tuple[str, str], ...] = ()


@dataclass
class Parcel:
    """What is pushed, and what was changed on the way."""

    files: Files
    replaced: list[tuple[str, str]] = field(default_factory=list)

    def listing(self) -> str:
        """Every file with its size, and the sum."""
        sizes = [(there, here.stat().st_size) for there, here in self.files]
        width = max(len(there) for there, _ in sizes)
        lines = [f"{there:{width}}  {size:>14,}" for there, size in sizes]
        return "\n".join([*lines, f"{'all':{width}}  {sum(size for _, size in sizes):>14,} bytes"])


def prepare(source: Source, offer: Offer, folder: Path) -> Parcel:
    """Lay everything out in an empty folder and check it. Raises UserError."""
    name = check_repository(offer.repository)
    check_path(Path(name.repository), source.kind)
    labels = label(source, offer)
    report = find_report(source.folder)
    check_ready_models(source)
    check_trained(source.meta, source.folder)
    check_gain(source.meta, report, source.folder.parent / "log.jsonl")
    copy_native(source, folder)
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    copy_recipe(source, folder)
    for file, text in bundle(source.kind, name.repository).items():
        write_text(folder / FOLDER / file, text)
    for engine in offer.exports:
        write_export(find_export(source.kind, engine), source, folder / engine)
    write_text(folder / CARD, card(labels, source.meta, report, own_arms(source.meta, report)))
    pairs = replacements(source, offer)
    replace_all(folder, pairs, str(source.meta["target"]["model"]))
    files = [
        (path.relative_to(folder).as_posix(), path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    check_clean(files, f"{FOLDER}/")
    return Parcel(files, pairs)


def check_repository(text: str) -> HubName:
    """Raises UserError for what is no name to push to."""
    name = hub_name(text)
    if name is None or name.revision is not None:
        raise UserError(f"--repo {text}: give a name on the Hub, org/name")
    return name


def label(source: Source, offer: Offer) -> Labels:
    """What the card says in the user's name. Raises UserError for what is missing."""
    if offer.license is None or LICENSE.fullmatch(offer.license) is None:
        raise UserError(
            f"--license {offer.license or 'is missing'}: say under which licence the drafter is "
            "given away, by its identifier on the Hub, such as apache-2.0"
        )
    data = offer.data_license
    if data is None and source.recipe.data.prompts == "starter":
        data = STARTER
    if not data:
        raise UserError(
            "--data-license is missing: say where the training prompts come from and under which "
            f"licence ({source.recipe.data.prompts} says nothing of it)"
        )
    return Labels(offer.repository, base_model(source, offer), offer.license, data, offer.exports)


def base_model(source: Source, offer: Offer) -> str:
    """The target's name on the Hub. Raises UserError where only a folder is known."""
    model = str(source.meta["target"]["model"])
    if offer.base_model is not None:
        if hub_name(offer.base_model) is None:
            raise UserError(f"--base-model {offer.base_model}: give a name on the Hub, org/name")
        return offer.base_model
    if model in BUILTINS:
        return BUILTINS[model].hub
    if is_path(model) or local_folder(model) is not None or hub_name(model) is None:
        raise UserError(
            f"--base-model is missing: the target is {model}, which others do not have; give its "
            "name on the Hub, org/name"
        )
    return model


def check_ready_models(source: Source) -> None:
    """Raises UserError for a drafter made of folders that others do not have."""
    for name in source.meta["drafter"].get("models", ()):
        if is_path(name) or local_folder(name) is not None or hub_name(name) is None:
            raise UserError(
                f"the drafter is made of {name}, a folder of this machine: push that model first, "
                "and make the drafter of its name on the Hub"
            )


def find_report(folder: Path) -> dict[str, Any]:
    """report.json, of the run or of the drafter alone. Raises UserError where there is none."""
    for place in (folder.parent / "report", folder / "report"):
        path = place / "report.json"
        if path.is_file():
            try:
                found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path}: is damaged ({error}); evaluate again") from error
            return {**found, "command": without_folder(found["command"])}
    raise UserError(
        f"{folder} has no report, and what nobody has measured is not pushed; run `draftsmith eval`"
    )


def without_folder(command: str) -> str:
    """A command line, its program without the folder that it lies in."""
    program, *words = shlex.split(command)
    return shlex.join([Path(program).name, *words])


def copy_native(source: Source, folder: Path) -> None:
    """The drafter's own files."""
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name != CARD:
            shutil.copyfile(path, folder / path.name)


def copy_recipe(source: Source, folder: Path) -> None:
    """recipe.yaml as the run has it, or as the drafter carries it."""
    there = source.folder.parent / "recipe.yaml"
    if there.is_file():
        shutil.copyfile(there, folder / there.name)
    else:
        write_text(folder / "recipe.yaml", dump_recipe(source.recipe))


def replacements(source: Source, offer: Offer) -> list[tuple[str, str]]:
    """What is replaced in texts: what the user says, and the target's folder by its name."""
    pairs, model = list(offer.replace), str(source.meta["target"]["model"])
    if offer.base_model is not None and model not in BUILTINS and model != offer.base_model:
        pairs.append((model, offer.base_model))
    return sorted(pairs, key=lambda pair: -len(pair[0]))  # a longer path may begin with a shorter


def replace_all(folder: Path, pairs: Sequence[tuple[str, str]], target: str) -> None:
    """In every text but the code; the target's name only where it is whole. A target that has got
    another name has no digest of a folder.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix not in TEXTS or path.parent.name == FOLDER:
            continue
        text = path.read_text(encoding="utf-8")
        for old, new in pairs:
            whole = rf"(?<![\w./~-]){re.escape(old)}(?![\w./-])"
            pattern = whole if old == target else re.escape(old)
            text = re.sub(pattern, lambda _, new=new: new, text)  # type: ignore[misc]
        write_text(path, text)
    for path in sorted(folder.rglob(META)):
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["target"]["model"] != target:
            meta["target"]["content"] = "none"
            write_json(path, meta)
