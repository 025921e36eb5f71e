"""Helpers of several test files. Nothing here is a test, and no test file imports another."""
