#!/usr/bin/env python3
"""The `build.py` command; everything it does lives in the package `trainyard`."""

from trainyard.cli import run

if __name__ == "__main__":
    run()
