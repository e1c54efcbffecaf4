"""A store of this attempt's own, for jobs whose ranks torchrun starts again.

torchrun's agent keeps one key-value store over all attempts, and since torch 2.14 an attempt finds the addresses that
the dead ranks of the one before left there, under the same keys. So the ranks agree on a word that is new:

    rank r > 0:  hello/r = nonce                     waits for reply/<nonce> = word, then sets ack/<word>/r
    rank 0:      answers every nonce that it finds, of dead ranks too, until it has all acks of its word
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.01


def own_store(timeout: timedelta) -> dist.Store | None:
    """A store that no earlier attempt has written to; None where a launcher gives a new one to every attempt.

    Raises:
        torch.distributed.DistError: not all ranks were there within `timeout`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = dist.PrefixStore("unifmoe", dist.TCPStore(address, port, size, is_master=False, timeout=timeout))
    word = _give(agents, size, timeout) if rank == 0 else _ask(agents, rank)
    return dist.PrefixStore(word, agents)


def _ask(store: dist.Store, rank: int) -> str:
    nonce = secrets.token_hex(8)
    store.set(f"hello/{rank}", nonce)
    word = store.get(f"reply/{nonce}").decode()  # waits for it
    store.set(f"ack/{word}/{rank}", "")
    return word


def _give(store: dist.Store, size: int, timeout: timedelta) -> str:
    word, answered = secrets.token_hex(8), set()
    missing, limit = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in list(missing):
            if store.check([f"ack/{word}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]) and (nonce := store.get(f"hello/{rank}").decode()) not in answered:
                store.set(f"reply/{nonce}", word)
                answered.add(nonce)
        if time.monotonic() > limit:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not come")
        time.sleep(_POLL_SECONDS)
    return word
