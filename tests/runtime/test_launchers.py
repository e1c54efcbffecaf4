"""The same code under every launcher: who am I, and where do we meet?"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import _context
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import launchers
from unifmoe_dist.runtime.local_ranks import write_output_to

ROOT = Path(__file__).parents[2]
LAUNCHER_PREFIXES = ("OMPI_", "PMI", "SLURM_", "MPI_")
# Joins the job with both ranks in one expert-parallel group and adds up 1 + 2 over them.
PROGRAM = (
    "import torch\nfrom unifmoe_dist.runtime.ranks import running_ranks\nfrom unifmoe_dist.leaving import leave\n"
    "with running_ranks(2) as ranks:\n"
    "    total = ranks.all_sum(torch.tensor([ranks.rank + 1.0]))\n"
    "    print(f'joined {ranks.rank} of {ranks.world_size} sum {float(total)}\\n', end='', flush=True)\n"
    "leave()\n"
)
EXPECTED = {f"joined {rank} of 2 sum 3.0" for rank in (0, 1)}


def clean_environment(**extra: str) -> dict[str, str]:
    torch_names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in torch_names and not k.startswith(LAUNCHER_PREFIXES)}
    return {**kept, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **extra}


def joined(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if line.startswith("joined")}


def join(log: str, names: dict[str, str]) -> None:
    write_output_to(log)
    environment = clean_environment(**names)
    os.environ.clear()
    os.environ.update(environment)
    exec(PROGRAM, {})


def test_srun(tmp_path):
    """srun starts every process with its own variables; nothing else tells them of one another."""
    processes, logs = [], [tmp_path / f"rank-{rank}" for rank in range(2)]
    for rank, log in enumerate(logs):
        names = dict(
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NODELIST="localhost",
            SLURM_JOB_ID=str(os.getpid()),
        )
        processes.append(_context.Process(target=join, args=(str(log), names)))
        processes[-1].start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert joined("".join(log.read_text() for log in logs)) == EXPECTED


@pytest.mark.skipif(
    None in (shutil.which("mpirun"), importlib.util.find_spec("mpi4py")), reason="needs mpirun and the extra mpi"
)
def test_mpirun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["mpirun", "-np", "2", "--oversubscribe", sys.executable, str(tmp_path / "program.py")]
    allowed = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run(command, env=clean_environment(**allowed), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout) == EXPECTED


MPI = """
import sys, types
mpi = types.ModuleType("mpi4py.MPI")
mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: False
mpi.Finalize = lambda: print("finalized", flush=True)
sys.modules["mpi4py.MPI"] = mpi
from unifmoe_dist.leaving import leave
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status,printed", [(0, "finalized\n"), (1, "")])
def test_a_rank_that_succeeds_finalizes_mpi(status, printed):
    """Else mpirun takes it for failed and kills the others. One that fails may not: it would wait for them."""
    command = [sys.executable, "-c", MPI, str(status)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, printed), done.stderr


def test_torchrun(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "program.py"),
    ]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert joined(done.stdout) == EXPECTED


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(os, "environ", clean_environment())
    return os.environ


def test_no_launcher_is_one_rank(bare):
    launchers.identify()
    launchers.find_master()
    assert (bare["RANK"], bare["WORLD_SIZE"], bare["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


def test_torch_variables_win(bare):
    bare.update(RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", MASTER_ADDR="node0", MASTER_PORT="29500")
    bare.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="1")
    launchers.identify()
    assert (bare["RANK"], bare["WORLD_SIZE"]) == ("3", "4")


def test_kubeflow_and_people_leave_out_the_local_rank(tmp_path):
    """Without LOCAL_RANK DeepSpeed would ask MPI who this process is, whether an MPI library is there or not."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('MPI was asked')")
    processes, port = [], launchers.free_port()
    for rank in range(2):
        names = dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        environment = clean_environment(**names)
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
        command = [sys.executable, "-c", PROGRAM]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert joined("".join(outputs)) == EXPECTED
    notes = [line for line in "".join(outputs).splitlines() if line and not line.startswith("joined")]
    assert not [note for note in notes if not note.startswith("[Gloo]")]  # which torch 2.9 prints below Python


@pytest.mark.parametrize("gpus,here,local", [(0, None, "0"), (4, None, "1"), (8, None, "5"), (0, "3", "2")])
def test_a_local_rank_is_found(bare, monkeypatch, gpus, here, local):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    bare.update(RANK="5", WORLD_SIZE="8", MASTER_ADDR="node0", MASTER_PORT="29500")
    if here is not None:
        bare["LOCAL_WORLD_SIZE"] = here
    launchers.identify()
    assert bare["LOCAL_RANK"] == local


MEETING = dict(MASTER_ADDR="node0", MASTER_PORT="29500")


@pytest.mark.parametrize(
    "names,sentence",
    [
        (dict(RANK="0"), "RANK is 0, but WORLD_SIZE is not set; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
        (dict(WORLD_SIZE="2"), "WORLD_SIZE is 2, but RANK is not set"),
        (dict(RANK="one", WORLD_SIZE="2"), "RANK must be a whole number of at least 0, not 'one'"),
        (dict(RANK="", WORLD_SIZE="2"), "RANK must be a whole number of at least 0, not ''"),
        (dict(RANK="-1", WORLD_SIZE="2"), "RANK must be a whole number of at least 0, not '-1'"),
        (dict(RANK="0", WORLD_SIZE="0"), "WORLD_SIZE must be a whole number of at least 1, not '0'"),
        (dict(RANK="2", WORLD_SIZE="2"), "RANK 2 must be below WORLD_SIZE 2"),
        (dict(RANK="0", WORLD_SIZE="2"), "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT not"),
        (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="node0"), "but MASTER_PORT not"),
        (dict(RANK="0", WORLD_SIZE="2", **{**MEETING, "MASTER_PORT": "http"}), "MASTER_PORT must be a whole number"),
        (dict(RANK="0", WORLD_SIZE="2", **{**MEETING, "MASTER_PORT": "70000"}), "MASTER_PORT 70000 must be at most"),
        (dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="x", **MEETING), "LOCAL_RANK must be a whole number"),
        (dict(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="x", **MEETING), "LOCAL_WORLD_SIZE must be a whole number"),
    ],
)
def test_what_does_not_belong_together_is_one_sentence(bare, names, sentence):
    bare.update(names)
    with pytest.raises(UserError, match=re.escape(sentence)):
        launchers.identify()
        launchers.find_master()


def test_a_rank_that_is_no_number_is_told_as_such():
    """The end of a failing job reads the rank as well."""
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--estimate"]
    done = subprocess.run(command, env=clean_environment(RANK="one", WORLD_SIZE="2"), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: RANK must be"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_mpi_inside_slurm_counts_as_mpi(bare):
    """mpirun starts its daemons through srun, whose variables then describe daemons, not ranks."""
    bare.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="2")
    bare.update(OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_SIZE="8")
    launchers.identify()
    assert (bare["RANK"], bare["LOCAL_RANK"], bare["WORLD_SIZE"]) == ("5", "1", "8")


def test_a_batch_script_is_not_a_step(bare):
    bare.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="16")
    launchers.identify()
    assert bare["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    "module,sentence",
    [
        (
            "raise ModuleNotFoundError('No module named mpi4py')",
            "mpi4py is not installed; `pip install 'unifmoe-dist[mpi]'`, or set MASTER_ADDR and MASTER_PORT",
        ),
        (
            "raise RuntimeError('cannot load MPI library\\nlibmpi.so: cannot open')",
            "mpi4py finds no MPI library (cannot load MPI library); install one, or set MASTER_ADDR and MASTER_PORT",
        ),
    ],
)
def test_mpirun_without_mpi_is_one_sentence(bare, tmp_path, monkeypatch, module, sentence):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    bare.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    launchers.identify()
    with pytest.raises(UserError) as caught:
        launchers.find_master()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_rank_alone_may_take_any_free_port(bare):
    """A sweep's runs do, and each asks twice which rank it is."""
    bare.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    launchers.identify()
    launchers.identify()
    assert (bare["RANK"], bare["WORLD_SIZE"], bare["MASTER_PORT"]) == ("0", "1", "0")
    bare.update(WORLD_SIZE="2")
    with pytest.raises(UserError, match="MASTER_PORT must be a whole number of at least 1"):
        launchers.identify()


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("node7", "node7"),
        ("gpu[03-05,9],login", "gpu03"),
        ("a1,a2", "a1"),
        ("r[1-2]n[08-11]", "r1n08"),
        ("gpu[001]-ib", "gpu001-ib"),
        ("localhost", "localhost"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert launchers.first_host(nodes) == first
