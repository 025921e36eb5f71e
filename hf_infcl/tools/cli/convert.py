"""`infcl convert`: writes a model of OpenCLIP in transformers' format, or the other way round."""

from __future__ import annotations

import argparse

from ...conversion import convert as converted
from .launched import mistakes_in_one_line


def convert(parser: argparse.ArgumentParser, namespace: argparse.Namespace, user_options: set[str]) -> None:
    """Converts, and prints what was written and how it compares."""
    with mistakes_in_one_line(parser.prog, of_libraries=True):
        for sentence in converted(**vars(namespace)):
            print(sentence)
