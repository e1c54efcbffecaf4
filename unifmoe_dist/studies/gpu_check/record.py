"""What a part of the check finds: verdicts and tables, written after each, so that a part that dies leaves them."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.records import plain

OK, FAILED, SKIPPED, NOTE = "ok", "failed", "skipped", "note"


class DeviceLost(Exception):
    """The device takes no more work in this process: what else the part has to do cannot run."""


class LeftOut(Exception):
    """Something cannot be done here; the message says why."""


class Record:
    """The findings and tables of one part.

    Args:
        path: The JSON file that holds them.
        seconds: How long the part may take.
        on_card: Whether there is a card; without one, sizes are tiny and Triton interprets.
    """

    def __init__(self, path: Path, seconds: float, on_card: bool) -> None:
        self.path, self.on_card = path, on_card
        self.ends = time.monotonic() + seconds
        self.findings: list[dict[str, str]] = []
        self.tables: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, Any] = {}
        self.doing = ""

    @property
    def left(self) -> float:
        """Seconds until the part is ended."""
        return self.ends - time.monotonic()

    def find(self, what: str, verdict: str, text: str) -> None:
        """A finding: OK, FAILED, SKIPPED with the reason, or NOTE for what is only told."""
        self.findings.append({"what": what, "verdict": verdict, "text": " ".join(text.split())})
        print(f"{verdict}: {what}: {text}", flush=True)
        self.save()

    def judge(self, what: str, good: bool, text: str) -> None:
        self.find(what, OK if good else FAILED, text)

    def row(self, table: str, title: str, cells: Mapping[str, Any]) -> None:
        """One more row of a table; cells are shown as they are."""
        self.tables.setdefault(table, {"title": title, "rows": []})["rows"].append(
            {k: str(v) for k, v in cells.items()}
        )
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What fails inside is found, and the part goes on, unless the device is lost; what is missing is left out.

        Raises:
            DeviceLost: the error was one of the device, which no later call survives.
        """
        self.doing = what
        self.save()
        try:
            yield
        except DeviceLost:
            raise
        except LeftOut as reason:
            self.find(what, SKIPPED, str(reason))
        except Exception as error:  # whatever a compiler, driver or library raises
            name = error.name or "" if isinstance(error, ModuleNotFoundError) else "unifmoe_dist"
            if not name.startswith("unifmoe_dist"):
                self.find(what, SKIPPED, f"{name.partition('.')[0]} is not installed")
                return
            traceback.print_exc()
            self.find(what, FAILED, one_line(error))
            if "CUDA error" in str(error):
                raise DeviceLost from error
        finally:
            self.doing = ""
            self.save()

    def save(self) -> None:
        found = {"findings": self.findings, "tables": self.tables, "numbers": self.numbers, "doing": self.doing}
        write_text(self.path, json.dumps(plain(found), indent=1))


def one_line(error: BaseException) -> str:
    """Kind and first line of an error's message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first[:300]}"
