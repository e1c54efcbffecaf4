"""The `unifmoe` command finds the scripts of launch/, passes options on and names what it does not know."""

from __future__ import annotations

import sys

import pytest

from unifmoe_dist import console, resources
from unifmoe_dist.train import options


@pytest.mark.parametrize("name", console.COMMANDS)
def test_every_command_has_a_script(name):
    assert resources.script(name).is_file()


def test_options_reach_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["unifmoe", "consolidate", "--help"])
    with pytest.raises(SystemExit) as exit:
        console.main()
    assert exit.value.code == 0
    assert "safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in console.COMMANDS if name != "train"])
def test_help_names_what_was_typed(name, monkeypatch, capsys):
    monkeypatch.setattr(options, "_program", None)
    monkeypatch.setattr(sys, "argv", ["unifmoe", name, "--help"])
    with pytest.raises(SystemExit):
        console.main()
    assert capsys.readouterr().out.startswith(f"usage: unifmoe {name} ")


def test_an_unknown_command_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["unifmoe", "trian"])
    with pytest.raises(SystemExit) as exit:
        console.main()
    assert exit.value.code == 2
    assert "no command 'trian'; choose one of train, " in capsys.readouterr().err


def test_without_a_command_all_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["unifmoe"])
    console.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in console.COMMANDS)


def test_several_gpus_go_through_the_launcher_but_its_ranks_do_not(monkeypatch):
    started = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(console.os, "execv", lambda program, words: started.append(words))
    monkeypatch.setattr(console.runpy, "run_path", lambda path, run_name: started.append(path))
    monkeypatch.setattr(sys, "argv", ["unifmoe", "train", "--steps", "3"])
    for name in ("RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    console.main()
    launcher = [sys.executable, "-m", "unifmoe_dist.runtime.deepspeed_launcher"]  # waits for ranks after Ctrl-C
    assert started[0] == [*launcher, str(resources.script("train")), "--steps", "3"]
    started.clear()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["unifmoe", "train"])
    console.main()
    assert started == [str(resources.script("train"))]
