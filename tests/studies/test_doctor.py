"""The doctor finds what is here, and says what to do about what is not; every command that it names exists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from launch import data as data_command
from tests.support import licences
from tests.support.glue_tables import write_rte
from tests.support.tiny_images import make_benchmark
from unifmoe_dist.console import COMMANDS
from unifmoe_dist.runtime.launchers import free_port
from unifmoe_dist.studies.doctor import connections, examination, findings, installation

ROOT = Path(__file__).parents[2]


def subjects(found) -> dict[str, findings.Finding]:
    return {finding.subject: finding for finding in found}


def commands(advice: str) -> list[list[str]]:
    return [shlex.split(words) for words in re.findall(r"`([^`]+)`", advice)]


def check_commands(finding: findings.Finding, makefile: str = (ROOT / "Makefile").read_text()) -> None:
    """Every command in an advice is one that can be given."""
    for words in commands(finding.advice):
        match words:
            case ["make", target]:
                assert re.search(rf"^{target}:", makefile, re.M)
            case ["pip", "install", *rest]:
                for requirement in (Requirement(word) for word in rest if not word.startswith("--")):
                    known = licences.requirements()
                    if requirement.name == "unifmoe-dist":
                        assert requirement.extras <= set(known)
                    else:
                        assert requirement.name in {r.name for part in known.values() for r in part} | {"triton"}
            case ["pip", "uninstall", package]:
                assert package == "mpi4py"
            case ["unifmoe", "data", "--help"]:
                assert "data" in COMMANDS
            case ["unifmoe", "data", *rest]:
                assert data_command.parser().parse_args(rest).command in ("prepare", "verify")
            case ["deepspeed", "--master_port", port, script]:
                assert port.isdecimal() and (ROOT / script).is_file()
            case ["export" | "unset", *names]:
                assert names and all(re.fullmatch(r"[A-Z_0-9]+(=\w+)?", name) for name in names)
            case [program, *_]:
                assert program in ("docker", "nvidia-smi", "dmesg", "apt-get"), words


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_this_environment_is_ready(tmp_path):
    make_benchmark(tmp_path / "vlcs", "vlcs", per_class=1)
    command = [sys.executable, str(ROOT / "launch/doctor.py"), "--json", "--data", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {entry["subject"]: findings.Finding(**entry) for entry in json.loads(result.stdout)}
    assert {"torch", "DeepSpeed", "gloo", "machine", "VLCS"} <= set(found)
    assert found["gloo"].text == "a sum over 2 ranks is right"
    for finding in found.values():
        assert bool(finding.advice) == (finding.status != "ok"), finding
        check_commands(finding)


def test_problems_are_counted(monkeypatch, capsys, tmp_path):
    from launch import doctor as command

    checks = (installation.python, lambda: iter([findings.problem("a", "is broken", "`make setup`")]))
    monkeypatch.setattr(examination, "CHECKS", checks)
    for words, shown in (([], "PROBLEM a "), (["--json"], '"status": "problem"')):
        with pytest.raises(SystemExit) as left:
            command.main(["--data", str(tmp_path), *words])
        assert left.value.code == 1
        out = capsys.readouterr().out
        assert shown in out and ("1 problem\n" in out or words)


def test_what_is_missing_comes_with_advice(monkeypatch):
    for module in (installation, connections):
        monkeypatch.setattr(module, "version_of", lambda package: None)
    monkeypatch.setattr(shutil, "which", lambda tool, *rest: None)
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    checks = (
        installation.torch_builds,
        installation.deepspeed,
        installation.tutel,
        installation.models,
        installation.driver,
    )
    found = [finding for check in checks for finding in check()]
    wrong = {f.subject for f in found if f.status == "problem"}
    assert wrong == {"torch", "DeepSpeed", "timm", "transformers", "datasets"}
    assert {f.subject for f in found if f.status == "note"} == {"Tutel", "text encoder", "GPU driver"}
    monkeypatch.setattr(installation, "version_of", lambda package: "2.8.0")
    found += [*installation.torch_builds(), *installation.deepspeed()]
    assert subjects(found)["torch"].status == "problem"
    assert {subjects(found)[name].status for name in ("ninja", "c++")} == {"note"}
    for finding in found:
        assert finding.advice or finding.status == "ok"
        check_commands(finding)


@pytest.mark.parametrize("version", ["2.9.1", "2.9.1+cu128", "2.10.0a0+git1", "2.14.1"])
def test_the_oldest_torch_that_works_is_no_problem(version, monkeypatch):
    monkeypatch.setattr(installation, "version_of", lambda package: version)
    assert next(installation.torch_builds()).status == "ok"


def test_a_check_that_fails_does_not_end_the_others(monkeypatch, tmp_path):
    def broken():
        raise OSError("a broken driver")
        yield

    monkeypatch.setattr(examination, "CHECKS", (broken, installation.python))
    first, second, last = examination.examine(tmp_path)
    assert first.status == "problem" and "a broken driver" in first.text and first.subject == "broken"
    assert (second.subject, last.subject) == ("Python", "data")


# -- GPUs -------------------------------------------------------------------------------------------------------------

SMI = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: {} |"


@pytest.mark.parametrize(
    "newest,built,visible,status,words",
    [
        ("12.4", "12.8", None, "ok", "CUDA up to 12.4"),
        ("12.4", "13.0", None, "problem", "torch is built for 13.0"),
        ("12.4", None, None, "problem", "built for the CPU"),
        ("12.4", "12.4", "", "note", "VISIBLE_DEVICES is empty"),
        ("12.4", "12.4", "unseen", "problem", "sees no GPU"),
        (None, "13.0", None, "note", "no NVIDIA GPU answers"),
    ],
)
def test_the_driver_and_torch_agree(newest, built, visible, status, words, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + (f"echo '{SMI.format(newest)}'\n" if newest else "exit 9\n"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible is None and newest is not None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible == "":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = installation.driver()
    assert finding.status == status and words in finding.text
    check_commands(finding)


# -- network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address,status", [("10.0.0.1", "ok"), ("127.0.1.1", "note"), (OSError("unknown"), "note")])
def test_where_the_host_name_leads(address, status, monkeypatch):
    def look_up(name):
        if isinstance(address, OSError):
            raise address
        return address

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    (finding,) = connections.names()
    assert finding.status == status and bool(finding.advice) == (status == "note")


def test_interfaces_that_are_named_but_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    finding = next(connections.interfaces())
    assert finding.status == "problem" and "GLOO_SOCKET_IFNAME is nowhere0" in finding.text
    check_commands(finding)
    for fine in ("lo", "^docker", "=lo"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", fine)
        assert all(finding.status != "problem" for finding in connections.interfaces())


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setattr(connections, "PORT", other.getsockname()[1])
        (finding,) = connections.port()
        assert finding.status == "note" and "in use" in finding.text
        check_commands(finding)
    monkeypatch.setattr(connections, "PORT", free_port())
    (finding,) = connections.port()
    assert finding.status == "ok"


def test_variables_of_a_launcher(monkeypatch):
    assert not list(connections.launcher_variables())
    monkeypatch.setenv("WORLD_SIZE", "2")
    (finding,) = connections.launcher_variables()
    assert "WORLD_SIZE set here" in finding.text
    check_commands(finding)


@pytest.mark.parametrize(
    "program,words",
    [("import time; time.sleep(60)", "did not come within 1 s"), ("exit('no route')", "failed: no route")],
)
def test_ranks_that_do_not_meet(program, words, monkeypatch, tmp_path):
    monkeypatch.setattr(connections, "ADD_UP", program)
    monkeypatch.setattr(connections, "SECONDS", 1.0 if "sleep" in program else 30.0)
    finding = connections._summed("gloo", 2, "`export GLOO_SOCKET_IFNAME=lo`")
    assert finding.status == "problem" and words in finding.text


# -- machine and data -------------------------------------------------------------------------------------------------


def test_a_small_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1e9, "total": 6e7}))
    found = list(installation.capacity())
    assert [finding.status for finding in found] == ["ok", "note", "note", "note"]
    for finding in found:
        check_commands(finding)


def test_data_sets_that_are_whole_or_not(tmp_path):
    root = tmp_path / "my data"
    make_benchmark(root / "pacs", "pacs", per_class=1)
    make_benchmark(root / "vlcs", "vlcs", per_class=1)
    shutil.rmtree(root / "vlcs/VLCS/SUN09/dog")
    (root / "terraincognita").mkdir()
    write_rte(root / "RTE")
    write_rte(root / "glue/rte")
    (root / "glue/rte/dev.tsv").unlink()
    (root / "mine").mkdir()
    found = list(examination.layouts(root))
    assert [(finding.subject, finding.status) for finding in found] == [
        ("PACS", "note"),
        ("VLCS", "problem"),
        ("TerraIncognita", "problem"),
        ("RTE", "ok"),
        ("RTE", "problem"),
    ]
    pacs, vlcs, terra, whole, broken = found
    assert "4 environments, 7 classes, 28 images, 9,991 published" in pacs.text
    assert "lacks dog" in vlcs.text and "--archive VLCS.tar.gz" in vlcs.advice
    assert "--archive" not in terra.advice  # it can be downloaded
    assert whole.text.endswith("official files") and "holds no RTE data" in broken.text
    for finding in found:
        check_commands(finding)
    assert commands(pacs.advice)[0][-1] == str(root / "pacs")


def test_the_advised_command_repairs_a_data_set(tmp_path):
    folder = make_benchmark(tmp_path / "vlcs", "vlcs", per_class=1)
    archive = shutil.make_archive(str(tmp_path / "VLCS"), "gztar", folder.parent, "VLCS")
    shutil.rmtree(folder / "SUN09")
    (broken,) = examination.layouts(tmp_path)
    folder.rename(tmp_path / "away")
    words = [archive if word == "VLCS.tar.gz" else word for word in commands(broken.advice)[0][2:]]
    with pytest.warns(UserWarning, match=rf"{tmp_path}/vlcs/VLCS holds 20 images.* --root {tmp_path}/vlcs/VLCS` shows"):
        data_command.main([*words, "--quiet"])
    (finding,) = examination.layouts(tmp_path)
    assert finding.status == "note" and "20 images" in finding.text


def test_no_data(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        (finding,) = examination.layouts(folder)
        assert finding.status == "note" and "no data sets" in finding.text


def test_an_mpi_library_that_ends_its_process_does_not_end_the_doctor(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").touch()
    (tmp_path / "mpi4py/MPI.py").write_text("import os\nos.write(2, b'*** MPI_INIT failed\\n')\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = installation.mpi()
    assert found.status == "note" and found.text == "the library does not start: MPI_INIT failed"
    (tmp_path / "mpi4py/MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    (found,) = installation.mpi()
    assert found.text == "mpi4py finds no MPI library" and "Lightning" in found.advice
    check_commands(found)
    (tmp_path / "mpi4py/__init__.py").write_text("raise ModuleNotFoundError('No module named mpi4py')\n")
    (found,) = installation.mpi()
    assert found.text == "mpi4py is not installed" and "unifmoe-dist[mpi]" in found.advice
    check_commands(found)
