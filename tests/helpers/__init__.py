"""Helpers that several test files share. Nothing here is a test, and no test file imports another."""
