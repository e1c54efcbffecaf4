"""The `unifmoe` command: one name for the scripts in launch/, wherever the package is installed."""

import os
import runpy
import sys

from unifmoe_dist import resources
from unifmoe_dist.train.options import name_program

COMMANDS = {
    "train": "train a model (through the deepspeed launcher where there are several GPUs)",
    "evaluate": "score a saved run",
    "generate": "text from a saved language model, and what each token used",
    "sweep": "run the experiments of a table",
    "report": "collect a sweep into tables and plots",
    "analyze": "diagnostics, figures and a report of a run",
    "benchmark": "time a layer or a model beside its peers",
    "memory": "hold memory estimates against measured peaks",
    "scale": "scaling study on the number of experts, and predictions",
    "data": "prepare and verify data sets",
    "consolidate": "one weights file from a run",
    "export": "a Transformers or timm folder from a run",
    "rehearse": "rehearse a job on two hosts, made on this machine of Linux namespaces",
    "gpu_check": "check a GPU: all runs, is right, and how fast",
    "doctor": "check this environment",
}


def usage() -> str:
    lines = [f"  {name:12} {text}" for name, text in COMMANDS.items()]
    return "usage: unifmoe COMMAND [options]; unifmoe COMMAND --help lists its options\n\n" + "\n".join(lines)


def main() -> None:
    """Run the script of the command that the first argument names."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"error: unifmoe has no command {name!r}; choose one of {', '.join(COMMANDS)}.", file=sys.stderr)
        sys.exit(2)
    path = resources.script(name)
    if name == "train" and _several_gpus():
        launcher = [sys.executable, "-m", "unifmoe_dist.runtime.deepspeed_launcher"]
        os.execv(sys.executable, [*launcher, str(path), *rest])  # noqa: S606
    name_program(f"unifmoe {name}")
    sys.argv = [str(path), *rest]
    runpy.run_path(str(path), run_name="__main__")


def _several_gpus() -> bool:
    """Whether there are several, and no launcher has started this process as one of its ranks."""
    if "RANK" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ or "SLURM_PROCID" in os.environ:
        return False
    import torch

    return torch.cuda.device_count() > 1
