"""``python -m ddp_callbacks.launcher`` is ``ddprun``, also where that is not in the PATH."""

from ddp_callbacks.launcher.cli import main

main()
