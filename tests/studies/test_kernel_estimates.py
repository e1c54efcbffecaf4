"""Predictions of kernels from what they are compiled to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from unifmoe_dist.studies.kernel_estimates.cases import CARDS, LOADS, Load
from unifmoe_dist.studies.kernel_estimates.compiled import Compiled, Launch, spilled
from unifmoe_dist.studies.kernel_estimates.estimate import (
    _line,
    floor_microseconds,
    inference_microseconds,
    lines,
    programs_per_processor,
)
from unifmoe_dist.studies.kernel_estimates.page import section
from unifmoe_dist.studies.kernel_estimates.work import work_of

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


class _Named:
    def __init__(self, name):
        self.__name__, self.params = name, []


def launch(name, options=None, **given):
    return Launch(_Named(name), given, options or {}, (1,))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("gated", [False, True])
def test_every_launch_of_a_step_has_a_line(gated):
    load, card = Load(300, 64, 128, 6, 4, 5.0, gated), CARDS["rtx3090"]
    said = []
    found = list(lines(load, card, said.append))
    names = [line.launch.name for line in found]
    assert names[:7] == [
        *("columns_kernel", "route_kernel", "_scan_kernel", "_fill_kernel"),
        *("ffn_kernel", "combine_kernel", "overflow_kernel"),
    ]
    assert len(said) == len({line.launch.key() for line in found}) and sum(line.backward for line in found) == 9
    assert all(line.microseconds >= 2 and line.made.registers > 8 and line.programs >= 1 for line in found)
    assert all(line.made.shared_memory <= card.shared_memory for line in found)
    page = section("a shape", load, card, found)
    assert page.count("\n| ") == len(found) + 2 and ("gated" in page) == gated
    forward, floor = [line for line in found if not line.backward], floor_microseconds(load, card)
    training = sum(line.microseconds for line in forward)
    inference = sum(inference_microseconds(line, load, card) for line in forward)
    assert f"Forward **{inference:.0f} µs**, {inference / floor:.2f} times the floor" in page
    assert inference <= training and f"({training:.0f} in training" in page


def test_programs_that_a_multiprocessor_holds():
    card = CARDS["h200"]
    assert programs_per_processor(8, Compiled(128, 0, 0), card) == 2  # 65,536 registers
    assert programs_per_processor(8, Compiled(129, 0, 0), card) == 1
    assert programs_per_processor(4, Compiled(32, 0, 100 * 1024), card) == 2  # 228 KiB
    assert programs_per_processor(8, Compiled(16, 0, 0), card) == 8  # 2,048 threads


def test_what_threads_move_to_and_from_the_stack_crosses_the_cache():
    """Twelve bytes once and sixteen in every turn of the loop, of 256 threads in every tile."""
    assembly = """
        /*0000*/                   STL.64 [R1+0x8], R2 ;    /* 0x01 */
        /*0010*/               @P0 LDL.LU R4, [R1] ;
        /*0020*/                   LDL.LU.128 R8, [R1+0x10] ;
        /*0030*/              @!P5 BRA 0x20 ;
        /*0040*/                   LDG.E.128 R4, [R2] ;
        /*0050*/                   BRA 0x50;
    """
    assert spilled(assembly) == (12, 16) and spilled("") == (0, 0)
    load, card = Load(1000, 64, 256, 3, 4, 6.0), CARDS["h200"]
    given = dict(E=4, B=4, PARTS=1, M=64, TILE_ROWS=16, TAIL_ROWS=16, kept_tiles=0, BLOCK_K=16, BLOCK_D=32)
    made = launch("ffn_kernel", BACKWARD=False, **given, options=dict(num_warps=8))
    least, more = (_line(made, False, Compiled(255, 0, 0, moved), load, card) for moved in ((0, 0), (12, 16)))
    tiles = (6000 + 16 * 8) / 16
    assert more.bytes - least.bytes == pytest.approx(256 * tiles * (12 + 16 * 64 / 16))
    assert more.bound == "L2" and more.microseconds > least.microseconds


@pytest.mark.parametrize("gated,matrices", [(False, 2), (True, 3)])
def test_operations_are_those_of_the_equations(gated, matrices):
    """2 per weight and row for each matrix forward, and 4 backward, where the keys are multiplied once more for tiles
    of which nothing was kept."""
    load = Load(1000, 64, 256, 3, 4, 6.0, gated)
    given = dict(E=4, B=4, PARTS=1, M=64, TILE_ROWS=16, TAIL_ROWS=16, kept_tiles=0, BLOCK_K=16, BLOCK_D=64)
    given |= dict(BLOCK_H=64, BLOCK_R=32)
    rows, padded = 6000, 6000 + 16 * 8
    forward = work_of(launch("ffn_kernel", BACKWARD=False, **given), load)
    assert forward.operations == 2 * matrices * padded * 64 * 64
    backward = work_of(launch("ffn_kernel", BACKWARD=True, **given), load).operations
    weights = work_of(launch("weight_grad_kernel", **given), load).operations
    assert weights == 2 * matrices * rows * 64 * 64
    wide = work_of(launch("weight_grad_kernel", **given | dict(BLOCK_D=128)), load)
    assert wide.operations == 2 * weights
    again = 2 * (matrices - 1) * padded * 64 * 64
    assert backward == forward.operations + again
    short = {**given, "TAIL_ROWS": 4, "kept_tiles": 1000}
    kept = work_of(launch("ffn_kernel", BACKWARD=True, **short), load)
    assert kept.operations == 2 * matrices * (rows + 4 * 8) * 64 * 64
    assert work_of(launch("overflow_kernel", **given), load) is None


def test_the_floor_is_that_of_measured_dense_layers():
    """DESIGN.md, section 5: 0.095, 0.169 and 0.667 ms."""
    floors = [floor_microseconds(LOADS[name], CARDS["h200"]) for name in ("vision", "language", "language-16k")]
    assert floors == pytest.approx([95, 169, 677], rel=0.01)
    assert floor_microseconds(LOADS["language-16k"], CARDS["h100"]) == pytest.approx(677, rel=0.03)


def test_the_page_has_every_card_and_shape():
    page = (ROOT / "docs/kernel_estimates.md").read_text()
    titles = re.findall(r"^## (.+)$", page, re.M)
    assert titles == [f"{card.name}: {shape}" for card in CARDS.values() for shape in LOADS]


def test_an_unknown_card_is_named():
    command = [sys.executable, "launch/kernel_estimates.py", "--cards", "h300"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "h300" in done.stderr and "rtx3090" in done.stderr
