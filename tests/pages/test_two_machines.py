"""The two machines of ``examples/two_machines``: their files fit together, and what is inside runs on two hosts.

No image is built here: hosts made of namespaces take the place of the containers.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from jobs import LIMIT, REASON
from kit.hosts import Host, HostBed
from kit.paths import ROOT

FOLDER = ROOT / "examples" / "two_machines"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
README = (FOLDER / "README.md").read_text()
DOCKERFILE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)", DOCKERFILE, re.MULTILINE)


def test_the_files_of_the_example_fit_together() -> None:
    """The two containers of the example fit together."""
    services = COMPOSE["services"]
    assert {name: service["hostname"] for name, service in services.items()} == {"node1": "node1", "node2": "node2"}
    assert len({service["image"] for service in services.values()}) == 1
    build = services["node1"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT and context / build["dockerfile"] == FOLDER / "Dockerfile"
    # What the image copies is there, and is sent to the builder.
    sent = [line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [path for line in instructions("COPY") for path in line.split()[:-1]]
    assert "ddp_callbacks" in copied and all((ROOT / path).exists() for path in [*copied, *sent])
    assert not [path for path in copied if not any(Path(path).is_relative_to(root) for root in sent)]


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.hosts
@pytest.mark.cold
@pytest.mark.xdist_group("hosts-examples")
def test_the_command_of_the_readme_trains_over_both(tmp_path: Path) -> None:
    """The README's command trains over two machines."""
    image = tmp_path / "image"
    shutil.copytree(ROOT / "examples" / "digits_lightning", image / "srv" / "digits")
    (image / "ssh").mkdir()
    shutil.copy(FOLDER / "sshd_config", image / "ssh")
    with HostBed(2, prefix="node") as bed:
        first, second = bed.hosts
        bed.end_sshd()
        for host in bed.hosts:
            _become_container(host, image)
        environ = first.environ(PATH=f"{Path(sys.executable).parent}:{first.environ()['PATH']}")
        made = first.run("sh", str(FOLDER / "make_keys.sh"), environ=environ)
        assert made.returncode == 0, made.stderr
        shutil.copytree(first.home / ".ssh", second.home / ".ssh")
        (command,) = instructions("CMD")
        servers = [host.start(*json.loads(command)) for host in bed.hosts]
        try:
            for host in bed.hosts:
                bed._await_sshd(host)
            login = first.run("ssh", "node2", "hostname")
            assert (login.returncode, login.stdout) == (0, "node2\n"), login.stderr
            (folder,) = instructions("WORKDIR")
            train = re.findall(r"^docker compose exec node1 (.+?) *(?:#.*)?$", README, re.MULTILINE)[0]
            done = first.run(*shlex.split(train), "--epochs", "1", cwd=folder, environ=environ, timeout=LIMIT)
            assert done.returncode == 0, done.stdout + done.stderr
            assert re.search(r"\[node1:0\] 2 processes: accuracy 0\.\d{3}, loss \d\.\d{4} on 360", done.stdout)
            assert "node2: rank 1" in done.stderr, done.stderr
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _become_container(host: Host, image: Path) -> None:
    """Give the host the folders of the image, without keys."""
    shutil.rmtree(host.home / ".ssh")
    for source, target in (("srv", "/srv"), ("ssh", "/etc/ssh")):
        done = host.run("mount", "--bind", str(image / source), target)
        assert done.returncode == 0, done.stderr
