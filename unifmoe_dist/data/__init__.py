"""Tasks: where the data comes from and how it is cut."""
