"""The words of a check."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ...shards.values import counted
from .findings import Finding
from .set_facts import SetFacts
from .sheet import draw_sheet

# In --output_dir. A push leaves out what begins with an underscore: the sheet shows training images.
SHEET_FILE, FINDINGS_FILE = "_check.png", "_check.json"
MIB = 1 << 20


def facts_lines(facts: SetFacts, *, workers: int, seconds: float) -> Iterator[str]:
    """The facts of a set, for a person. ``workers`` processes read it, and together took so many seconds."""
    what = "pairs" if facts.has_captions else "labelled images"
    read = "all read" if facts.is_whole else f"{facts.looks:,} read"
    pairs = f"{facts.pairs:,} {what}, {read}" if facts.pairs is not None else f"{facts.looks:,} {what} read"
    split = "" if facts.split is None else f", split {facts.split}"
    yield f"{facts.name}{split}: {pairs} by {counted(workers, 'worker')} in {seconds:.1f} s."
    if facts.sizes:
        width, height = (int(statistics.median(sides)) for sides in zip(*facts.sizes, strict=True))
        least, most = min(map(min, facts.sizes)), max(map(max, facts.sizes))
        kilobytes = statistics.fmean(facts.nbytes) / 1000
        sides = "" if len(set(facts.sizes)) == 1 else f" (medians), sides from {least:,} to {most:,}"
        yield f"  Images: {width} × {height} pixels{sides}; {kilobytes:.1f} kB each (mean)."
    if facts.tokens:
        captions = len(facts.tokens) / len(facts.caption_ids)
        per_token = sum(facts.caption_bytes) / max(1, sum(facts.tokens))
        yield (
            f"  Captions: {captions:.1f} for an image; {statistics.median(facts.tokens):g} tokens (median) of at most "
            f"{facts.limits.tokens} that the model reads; {per_token:.1f} bytes in a token."
        )
    if sizes := [nbytes / MIB for nbytes in facts.bytes_of_shards.values()]:
        pairs_of = facts.pairs_of_shards.values()
        counts = f"; {_from_to([f'{n:,}' for n in sorted(pairs_of)])} pairs in each" if facts.is_whole else ""
        yield f"  Shards: {len(pairs_of):,} read, of {_from_to([f'{size:.1f}' for size in sorted(sizes)])} MiB{counts}."
    if facts.rate:
        milliseconds = 1000 / facts.rate
        yield f"  Loading: {milliseconds:.1f} ms for an image, so that a worker gives {facts.rate:,.0f} per second."


def _from_to(ordered: Sequence[str]) -> str:
    """The first and the last of numbers as a range, or one number if both are written alike."""
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def finding_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """The findings of a set, for a person."""
    for finding in findings:
        yield f"  {'SPOILS' if finding.spoils else 'note'}: {finding.text}"
    if not findings:
        yield "  Nothing wrong was found."


def write_report(folder: Path | None, results: Mapping[str, tuple[SetFacts, Sequence[Finding]]], to_add: str) -> None:
    """Writes the contact sheet and all findings with their rows into a folder, if any, and tells the options to add."""
    if folder is None:
        print("With --output_dir, the check also writes pictures and all rows of each finding.")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        draw_sheet(list(results.values())).save(folder / SHEET_FILE)
        sets = {
            name: {
                "pairs": facts.pairs,
                "read": facts.looks,
                "pairs_per_second_of_a_worker": round(facts.rate, 1),
                "findings": [asdict(finding) for finding in findings],
            }
            for name, (facts, findings) in results.items()
        }
        text = json.dumps({"options": to_add, "sets": sets}, indent=1)
        (folder / FINDINGS_FILE).write_text(text, encoding="utf-8")
        print(f"Pictures are in {folder / SHEET_FILE}, and all rows of each finding in {folder / FINDINGS_FILE}.")
    if to_add:
        print(f"Add to `infcl train`: {to_add}")
