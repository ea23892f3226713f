"""Names on the Hub: `org/name`, or `org/name@revision`."""

import re
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([\w.-]+?)(?:@([\w./-]+))?")


@dataclass(frozen=True)
class HubName:
    """A repository, and the revision that is meant."""

    repository: str
    revision: str | None

    @property
    def short(self) -> str:
        """A name for a folder of this machine."""
        return self.repository.replace("/", "--")


def hub_name(text: str) -> HubName | None:
    """What a user's word means on the Hub; None where it can only be a file or a folder here, as
    `runs/mine` is beside other runs.
    """
    found = NAME.fullmatch(text)
    if found is None or text.endswith((".yaml", ".yml", ".json", ".jsonl")):
        return None
    owner, name, revision = found.groups()
    here = Path(text).exists() or Path(owner).is_dir()
    return None if here else HubName(f"{owner}/{name}", revision)
