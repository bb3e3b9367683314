"""`wholestep bench`: a compiled step against eager PyTorch and torch.compile, each in a process of its own.

`race.py` tells the processes when to work, `worker.py` is what runs in them, `results.py` keeps what was found.
"""
