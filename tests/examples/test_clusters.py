"""Scripts of examples/cluster, and the compose file, as jobs on several hosts start from them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.faults import SMALL
from tests.support.jobs import ROOT
from tests.support.two_hosts import network_of_two  # noqa: F401  the fixture two_hosts
from unifmoe_dist.train.cli import parse_train_config

EXAMPLES = sorted((ROOT / "examples/cluster").iterdir())
TRAIN_LINE = re.compile(r"launch/train\.py(.*(?:\\\n.*)*)")


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.suffix in (".sh", ".sbatch")], ids=lambda p: p.name)
def test_scripts_for_clusters_are_sound(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", path]).returncode == 0
    (line,) = TRAIN_LINE.findall(path.read_text())
    given = line.replace("\\\n", " ").split("||")[0].replace('"$@"', "").replace('"$run"', "runs/x")
    config = parse_train_config(shlex.split(given))
    assert config.resume == "auto" and config.output == "runs/x"


@pytest.mark.slow
def test_the_command_of_the_compose_file_trains_over_two_hosts(two_hosts, tmp_path):
    services = yaml.safe_load((ROOT / "docker/compose.yml").read_text())["services"]
    commands = [services[host.name]["command"] for host in two_hosts.hosts]
    log = (tmp_path / "log").open("w+")
    small = [*SMALL, "--steps", "2", "--output", str(tmp_path / "run")]
    processes = [
        host.start(
            [sys.executable, "-m", "torch.distributed.run", *command[1:], *small],
            log,
            PYTHONPATH=str(ROOT),
            DS_ACCELERATOR="cpu",
            OMP_NUM_THREADS="1",
            TORCHDYNAMO_DISABLE="1",
        )
        for host, command in zip(two_hosts.hosts, commands, strict=True)
    ]
    statuses = [process.wait(120) for process in processes]
    assert statuses == [0, 0], Path(log.name).read_text()
    assert (tmp_path / "run/summary.json").is_file()
