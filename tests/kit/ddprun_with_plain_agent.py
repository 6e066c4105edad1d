"""``ddprun`` with ``plain_agent.py`` in place of torchrun's agent, on every node; it takes the same arguments."""

from __future__ import annotations

from pathlib import Path

from ddp_callbacks.launcher import __main__, launch

if __name__ == "__main__":
    launch.AGENT = ("-P", str(Path(__file__).with_name("plain_agent.py")))
    __main__.main()
