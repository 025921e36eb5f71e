"""Reads data sets as a training would, and finds what would spoil it: faulty pairs, copies, leaks, slow loading."""

from .facts import SetFacts
from .faults import Limits
from .findings import Finding, findings_of_overlap, findings_of_set
from .looking import Caption, Look, Looker
from .reading import read
from .report import as_json, facts_lines, finding_lines, options_to_add
from .sheet import draw_sheet

__all__ = [
    "Caption",
    "Finding",
    "Limits",
    "Look",
    "Looker",
    "SetFacts",
    "as_json",
    "draw_sheet",
    "facts_lines",
    "finding_lines",
    "findings_of_overlap",
    "findings_of_set",
    "options_to_add",
    "read",
]
