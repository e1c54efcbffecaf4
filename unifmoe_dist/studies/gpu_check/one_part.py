"""The process of one part: `python -m unifmoe_dist.studies.gpu_check.one_part FUNCTION FILE SECONDS CARD [WORD ...]`.

FUNCTION is MODULE:NAME, FILE takes what is found, CARD is "card" or "none", and the words are for the function.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from unifmoe_dist.leaving import leave
from unifmoe_dist.studies.gpu_check.record import FAILED, DeviceLost, Record


def main(function: str, file: str, seconds: str, card: str, *words: str) -> None:
    """Run it; the log tells where it was if it crashes or is about to be ended for taking too long."""
    if sys.platform == "linux":  # so that it ends with who started it, however that ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, 0.95 * float(seconds)))
    record = Record(Path(file), float(seconds), card == "card")
    record.save()
    module, _, name = function.partition(":")
    try:
        if os.environ.get("TRITON_INTERPRET") == "1":
            with record.attempt("Triton's interpreter"):
                from unifmoe_dist.kernels.triton.interpreter import quicken

                quicken()
        with record.attempt("the whole part"):
            getattr(import_module(module), name)(record, *words)
    except DeviceLost:
        record.find("what comes after", FAILED, "not run: an error of the device ends its process")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
