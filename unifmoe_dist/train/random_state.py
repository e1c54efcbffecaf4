"""The state of all random generators of a rank as tensors."""

import random

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    del version, name
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Tensor]) -> None:
    gauss = state["python_gauss"].tolist()
    position, has_gauss, cached = state["numpy_rest"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    if not 0 <= position <= len(keys):
        raise ValueError(f"position {position:g} of {len(keys)}")  # NumPy would read there, outside its memory
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
