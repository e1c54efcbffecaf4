"""What a trained run's layers do, as one page, figures, tables and numbers: `launch/analyze.py`.

report_runs([load_run(Path("runs/mine"))], Path("runs/mine/analysis"), StudyOptions(), "how")
"""

from unifmoe_dist.studies.run_report.loaded_run import LoadedRun, load_run
from unifmoe_dist.studies.run_report.run_page import report_runs
from unifmoe_dist.studies.run_report.run_study import StudyOptions, can_be_diagnosed, shows_patches

__all__ = ["LoadedRun", "StudyOptions", "can_be_diagnosed", "load_run", "report_runs", "shows_patches"]
