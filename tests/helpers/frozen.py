"""Imported last by the server of processes: what its forks need not do themselves."""

from pathlib import Path

from jinja2 import Template

from hf_infcl.card import cards

from .processes import leave_out_of_collections

Template(Path(cards.__file__).with_name("template.jinja").read_text(encoding="utf-8"))  # is compiled once
leave_out_of_collections()  # accelerate collects garbage in every training
