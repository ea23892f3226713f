"""Fingerprints of targets that older versions wrote down."""

from collections.abc import Mapping
from typing import Any

NONE = "none"  # no quantisation, no adapter


def remembered(stored: Mapping[str, Any], now: Mapping[str, str]) -> dict[str, Any]:
    """A fingerprint that was written earlier, with what older ones do not say."""
    later = {"content": now.get("content"), "quantisation": NONE, "adapter": NONE}
    return {name: value for name, value in later.items() if name in now} | dict(stored)
