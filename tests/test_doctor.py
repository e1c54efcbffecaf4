"""The doctor finds what is here, and says what to do about what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from unifmoe_dist.engine import doctor

ROOT = Path(__file__).parent.parent


def test_this_environment_is_ready(tmp_path):
    (tmp_path / "PACS").mkdir()
    command = [sys.executable, str(ROOT / "launch/doctor.py"), "--data", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ready to train" in result.stdout
    assert "holds PACS" in result.stdout


def test_what_is_missing_comes_with_advice(monkeypatch, tmp_path):
    gone = {"deepspeed", "timm"}
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package in gone else version(package))
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None)
    findings = {finding.subject: finding for finding in doctor.examine(tmp_path)}
    assert {subject for subject, f in findings.items() if f.status == "problem"} == {"DeepSpeed", "timm"}
    assert all(f.advice for f in findings.values() if f.status != "ok")


def test_a_check_that_fails_does_not_end_the_others(monkeypatch, tmp_path):
    def broken():
        raise OSError("a broken driver")
        yield

    monkeypatch.setattr(doctor, "_gpus", broken)
    findings = list(doctor.examine(tmp_path))
    assert any(f.status == "problem" and "a broken driver" in f.text for f in findings)
    assert findings[-1].subject == "data"
