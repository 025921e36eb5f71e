"""Reads data sets as a training would, and finds what would spoil it: faulty pairs, copies, leaks, slow loading."""
