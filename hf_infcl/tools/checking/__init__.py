"""Reads data sets as a training would, and finds what would spoil it: faulty pairs, copies, leaks, slow loading."""

from .faults import Limits, limits_of
from .findings import Finding, findings_of_ceilings, findings_of_ledger, findings_of_overlap, findings_of_set
from .looking import Caption, Look, Looker
from .reading import read
from .report import facts_lines, finding_lines, options_to_add, write_report
from .set_facts import REPLAYED, TRAINED, SetFacts, facts_of

__all__ = [
    "REPLAYED",
    "TRAINED",
    "Caption",
    "Finding",
    "Limits",
    "Look",
    "Looker",
    "SetFacts",
    "facts_lines",
    "facts_of",
    "finding_lines",
    "findings_of_ceilings",
    "findings_of_ledger",
    "findings_of_overlap",
    "findings_of_set",
    "limits_of",
    "options_to_add",
    "read",
    "write_report",
]
