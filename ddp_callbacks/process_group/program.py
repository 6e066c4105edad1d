"""Where the program is, for messages about ranks that are late."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading

_LIBRARIES = (
    "<",
    os.path.dirname(os.path.dirname(__file__)),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
)


def where() -> tuple[str, str]:
    """The torch.distributed function that the main thread is in, and the current line of the program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    function = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            function = code.co_name
        if not _is_library(code.co_filename):
            return function, f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return function, "an unknown line"


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "site-packages" in path
