"""Recompute under a memory budget: which ops of forward run again in backward, so that the step fits, at least cost.

graph (what is decided about), templates (repeated layers), choice (the memory model), program and exact (the integer
program and its solver), greedy (the baseline), away (values in host memory), trials (plans of the step), copies (what
backward computes again already), fitter (the search against the real plan), fit (which ways there are, and which is
taken), report, impossible (what is said where nothing fits).
"""

from .fit import fit_budget
from .report import BudgetReport

__all__ = ["BudgetReport", "fit_budget"]
