"""Reports as one HTML page that needs nothing beside it, with every figure and table as files for other uses.

    page = Page("Title", "what this is", [KeyNumber("accuracy", Number(0.87, ".1%"))], [Section("Training", [picture])])
    write_page(page, folder)

The page holds its images, loads nothing, and runs no script.
"""

from unifmoe_dist.studies.html.page import Block, Cell, Code, KeyNumber, Number, Page, Picture, Section, Table, Text
from unifmoe_dist.studies.html.write import write_page

__all__ = ["Block", "Cell", "Code", "KeyNumber", "Number", "Page", "Picture", "Section", "Table", "Text", "write_page"]
