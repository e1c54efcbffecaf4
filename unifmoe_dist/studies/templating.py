"""The templates of pages and texts, templates/*: prose and layout stand there, numbers are handed to them."""

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def environment() -> Environment:
    """Jinja's environment for them; what is put into HTML is escaped."""
    return Environment(
        loader=PackageLoader("unifmoe_dist.studies"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
