"""What the library tells the user beside errors."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("ddp_callbacks")


def say(text: str, level: int = logging.INFO) -> None:
    """On standard error, unless the program has set up logging: then it decides, by the level."""
    if _log.hasHandlers():
        _log.log(level, text)
    else:
        print(f"ddp_callbacks: {text}", file=sys.stderr)
