"""The `deepspeed` launcher without a traceback after Ctrl-C: `python -m unifmoe_dist.runtime.deepspeed_launcher ...`.

The terminal interrupts all processes of a job. DeepSpeed's outermost would end at once, with a traceback and before the
ranks have saved; here it waits for them.
"""

import signal

from unifmoe_dist.runtime.failure import leave_for
from unifmoe_dist.runtime.signals import let_pass


def main() -> None:
    """Run the launcher on this process's arguments."""
    signal.signal(signal.SIGINT, let_pass)  # a function, not SIG_IGN, which the ranks would inherit
    try:
        from deepspeed.launcher.runner import main as deepspeed
    except ModuleNotFoundError as error:
        leave_for(error)
    deepspeed()


if __name__ == "__main__":
    main()
