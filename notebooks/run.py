#!/usr/bin/env python3
"""Runs every notebook of this folder from a fresh kernel; a cell that fails fails the run. Nothing is written back."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

folder = Path(__file__).parent
notebooks = sorted(folder.glob("*.ipynb"))
if not notebooks:
    sys.exit("no notebooks found")
for path in notebooks:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"{path.name}: {cells} cells ran")
