"""`swift plan`: memory and time of a run before it starts, on this machine or on another.

trace.py     what a computation allocates, computes and moves, from shapes alone
devices.py   memory and speed of accelerators
step.py      the trainer's own step on tensors without numbers
report.py    phases of a run, and what they add up to
command.py   the command
"""
