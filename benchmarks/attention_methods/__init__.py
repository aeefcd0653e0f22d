"""Attention methods of the literature side by side: what each computes, costs, moves and loses (`methods.py`)."""
