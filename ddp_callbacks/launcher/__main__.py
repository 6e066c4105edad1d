"""Entry point of ``ddprun``, also as ``python -m ddp_callbacks.launcher``."""

import os
import signal
import sys


def main() -> None:
    """Run ``ddprun`` with the arguments of this process, and exit with the job's code; 2 if nothing was started."""
    # Python's handler raises KeyboardInterrupt at any point of the program. While modules are imported, that may be in
    # code that ignores it, such as a finalizer, and the Ctrl-C is lost.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.getfilesystemencoding() != "utf-8":  # messages to the nodes must carry bytes of any encoding
        os.execv(sys.executable, [sys.executable, "-Xutf8", *sys.orig_argv[1:]])
    from ddp_callbacks.launcher import cli

    cli.main()


if __name__ == "__main__":
    main()
