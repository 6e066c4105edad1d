"""Run ``ddprun`` as ``python -m ddp_callbacks``."""

from ddp_callbacks.launcher.__main__ import main

if __name__ == "__main__":
    main()
