"""Text from saved language models, and what every token of it used."""

from unifmoe_dist.studies.generation.showing import coloured, legend, summary, write_html
from unifmoe_dist.studies.generation.writing import Sampling, Token, Writer, Written, load_writer

__all__ = ["Sampling", "Token", "Writer", "Written", "coloured", "legend", "load_writer", "summary", "write_html"]
