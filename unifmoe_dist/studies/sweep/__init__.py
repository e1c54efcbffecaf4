"""Many runs as one job: planned from tables, kept apart in folders, run side by side, taken up again."""
