"""What the library tells the user: its exceptions, and notices.

::

    DDPCallbacksError
    ├── ConfigurationError (ValueError)     what was asked for cannot be; says the rule, the value and the remedy
    │   └── RendezvousError                 the processes could not meet within the timeout
    ├── MismatchError (ValueError)          the ranks hold different models, settings, data or metrics
    └── PeerError (RuntimeError)            another rank failed, died or went silent

    NonFiniteLossWarning (RuntimeWarning)   the first loss that is NaN or infinite
"""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("ddp_callbacks")


class DDPCallbacksError(Exception):
    """Base of every exception that this library raises on purpose."""


class ConfigurationError(DDPCallbacksError, ValueError):
    """A setting, an argument or an environment variable that cannot work."""


class RendezvousError(ConfigurationError):
    """The processes could not meet: nobody answers at the address, or some rank never came."""


class MismatchError(DDPCallbacksError, ValueError):
    """The ranks disagree about something that must be equal; raised on every rank with the same text."""


class PeerError(DDPCallbacksError, RuntimeError):
    """Another rank raised, died, left or went silent; the message names it and its host."""


class NonFiniteLossWarning(RuntimeWarning):
    """The loss of a rank is NaN or infinite; given once in a run, by the first such rank."""


def say(text: str, level: int = logging.INFO) -> None:
    """On standard error, unless the program has set up logging: then it decides, by the level."""
    if _log.hasHandlers():
        _log.log(level, text)
    else:
        print(f"ddp_callbacks: {text}", file=sys.stderr)
