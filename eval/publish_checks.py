"""What must not leave the house: broken or untrained weights, a drafter that gains nothing, paths,
names and tokens of its maker.
"""

import getpass
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_token
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.drafters.checkpoint import drafter_config
from draftsmith.recipes.errors import UserError

TEXTS = {".json", ".jsonl", ".md", ".yaml", ".py", ".txt", ".jinja"}
TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bgithub_pat_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[baprs]-[A-Za-z0-9-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bAIza[0-9A-Za-z_-]{35}|(?i:bearer)\s+[A-Za-z0-9._-]{20,}"
)
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "DRAFTSMITH_API_KEY", "WANDB_API_KEY")
ROOTS = (  # below which people keep files
    "home|Users|root|mnt|media|tmp|var|private|Volumes|scratch|workspace|work|data|datasets|nfs"
    "|gpfs|lustre|opt|srv|export|models|projects"
)
PATHS = re.compile(
    rf"""(?<![\w.:/}}>-])(?:/(?:{ROOTS})/|~[\w-]*/|[A-Za-z]:\\+)[^\s"'`,;)\]]*""",
)
COMMON = {"root", "user", "admin", "ubuntu", "debian", "runner", "jovyan", "guest", "nobody"}
SHORTEST_NAME = 4  # letters of a user's name that is looked for: shorter ones are words
SHORTEST_SECRET = 8


def check_trained(meta: Mapping[str, Any], folder: Path) -> None:
    """Raises UserError for a drafter that took no steps, or has NaN or untouched weights."""
    trained = drafter_config(dict(meta)).trained_slots > 0
    if trained and not meta.get("steps"):
        raise UserError(f"{folder}: its drafter took no training step; train it first")
    for weights in sorted(folder.glob("*.safetensors")):
        check_numbers(weights, trained=trained)


def check_numbers(weights: Path, *, trained: bool) -> None:
    """Raises UserError for NaN, and for matrices that training did not move from zero."""
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights}: cannot be read ({error})") from error
    broken = [
        name
        for name, value in tensors.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if broken:
        raise UserError(f"{weights}: NaN or infinite numbers in {some(broken)}")
    zero = [
        name
        for name, value in tensors.items()
        if trained and value.ndim > 1 and not bool(value.any())
    ]
    if zero:
        raise UserError(
            f"{weights}: {some(zero)} is all zeros, as before training; train it longer"
        )


def check_gain(meta: Mapping[str, Any], report: Mapping[str, Any], log: Path) -> None:
    """Raises UserError for a drafter whose report does not stand for it."""
    arms = own_arms(meta, report)
    if not arms:
        raise UserError("report.json has no arm of this drafter; evaluate its run again")
    unlike = [
        key
        for key in ("model", "content", "architecture", "template")
        if report["target"].get(key) != meta["target"].get(key)
    ]
    if unlike:
        raise UserError(
            f"report.json is about another target ({', '.join(unlike)}); evaluate the run again"
        )
    false = [arm["name"] for arm in arms if arm["lossless"] is False]
    if false:
        raise UserError(
            f"report.json: {some(false)} did not give the target's output; that must be found first"
        )
    best = max(arm["tau_micro"] or 1.0 for arm in arms)
    if best <= 1.0:
        raise UserError("report.json: none of its drafts was ever accepted; train it longer")
    if drafter_config(dict(meta)).heals:
        check_healed(log)


def check_healed(log: Path) -> None:
    """A drafter that started from a trained one must not be worse. Raises UserError."""
    if not log.is_file():
        raise UserError(f"{log} is not there, which says whether training made the drafter worse")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    taus = [line["tau"] for line in lines if line.get("kind") == "held_out"]
    if len(taus) < 2 or taus[-1] < taus[0]:
        raise UserError(
            f"{log}: held-out tau {taus[:1]} before training, {taus[-1:]} after; a drafter that "
            "got worse is not pushed"
        )


def own_arms(meta: Mapping[str, Any], report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The report's arms of this drafter, lossy ones left out."""
    kind = meta["drafter"]["kind"]
    names = (kind, f"{kind} ({meta.get('recipe', {}).get('name')})")
    return [
        arm
        for arm in report["arms"]
        if arm["drafter"] in names and arm["lossless"] in (True, False)
    ]


def check_clean(files: Sequence[tuple[str, Path]], licensed_code: str) -> None:
    """Raises UserError for a token, a path of this machine or its user's name in any text file.

    licensed_code: the folder of code that is ours, where no names of people are looked for.
    """
    found: list[str] = []
    secrets = own_secrets()
    for there, here in files:
        if here.suffix not in TEXTS:
            continue
        text = here.read_text(encoding="utf-8")
        if there.startswith(licensed_code):
            found += [f"{there}: {hidden(one)}" for one in tokens(text, secrets)]
            continue
        if tokens(text, secrets):
            found += [f"{there}: a token ({hidden(one)})" for one in tokens(text, secrets)]
        found += [f"{there}: {one}" for one in personal(there, text)]
    if found:
        shown = "; ".join(list(dict.fromkeys(found))[:6])
        raise UserError(
            f"not pushed, for these would be made known: {shown}; say what stands there instead: "
            "--replace OLD=NEW, --base-model org/name for the target's folder"
        )


def own_secrets() -> list[str]:
    """Tokens that this machine holds."""
    given = [os.environ.get(name) for name in SECRETS] + [get_token()]
    return [one for one in given if one is not None and len(one) >= SHORTEST_SECRET]


def tokens(text: str, secrets: Sequence[str]) -> list[str]:
    """What looks like a token, or is one of ours."""
    found = [hit[0] for hit in TOKENS.finditer(text)]
    return found + [secret for secret in secrets if secret in text]


def hidden(token: str) -> str:
    """A token, told apart and not told."""
    return f"{token[:4]}..., {len(token)} characters"


def personal(there: str, text: str) -> Iterator[str]:
    """Paths of this machine and its user's name. What models and prompts say is not looked at."""
    looked = without_samples(text) if there.endswith("report.json") else text
    known = {str(Path.home()), str(Path.cwd())} - {"/"}
    yield from (f"the path {hit[0]}" for hit in PATHS.finditer(looked))
    yield from (f"the path {path}" for path in sorted(known) if f"{path}/" in looked)
    name = user_name()
    telling = len(name) >= SHORTEST_NAME and name.lower() not in COMMON
    if telling and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", looked):
        yield f"the user's name {name}"


def user_name() -> str:
    """Of who is logged in."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def without_samples(text: str) -> str:
    """A report without the texts in it."""
    report = json.loads(text)
    return json.dumps({name: value for name, value in report.items() if name != "samples"})


def some(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
