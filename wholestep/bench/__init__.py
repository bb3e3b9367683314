"""`wholestep bench`: a compiled step against eager PyTorch and torch.compile, each in a process of its own.

`field.py` says who is prepared when, `race.py` lets the contenders of a case take turns, `runner.py` holds a process,
`worker.py` is what runs in it, `results.py` keeps what was found.
"""
