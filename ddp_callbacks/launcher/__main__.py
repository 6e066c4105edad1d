"""Where ``ddprun`` begins; ``python -m ddp_callbacks.launcher`` is the same, also where that is not in the PATH."""

import signal


def main() -> None:
    """Run ``ddprun`` with the arguments of this process, and exit with the job's code; 2 if nothing was started."""
    # Python's own handler raises KeyboardInterrupt wherever the program is. While modules are imported that can be
    # inside what ignores it, a finalizer say, and the Ctrl-C is lost.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ddp_callbacks.launcher import cli

    cli.main()


if __name__ == "__main__":
    main()
