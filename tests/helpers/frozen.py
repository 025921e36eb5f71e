"""Imported last by the server of processes: what its forks need not do themselves."""

from .processes import leave_out_of_collections

leave_out_of_collections()  # accelerate collects garbage in every training
