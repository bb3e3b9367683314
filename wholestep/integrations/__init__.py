"""Where people already are: the loop helper `fit`, `transformers.Trainer` and Lightning, each around one compiled step.

A trainer's module is imported by the user who has that trainer: nothing here imports one on its own.
"""
