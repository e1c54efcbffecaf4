"""Jobs in threads of their own, whose errors pytest would not hear of."""

from __future__ import annotations

import threading


def in_threads(*jobs):
    """Run them at the same time; the errors that they raised."""
    raised = []

    def guarded(job):
        try:
            job()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
