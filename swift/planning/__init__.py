"""`swift plan`: memory and time of a run before it starts, on this machine or on another.

trace.py     what a computation allocates, computes and moves, from shapes alone; numbers.py: integers that are known
kernels.py   stand-ins for kernels that only CUDA has; sharded.py: for the other processes
devices.py   memory and speed of accelerators
cost.py      what a step costs whose passes are traced: step.py those of GRPO and EBFT, trl_step.py those of TRL
grpo.py, trl.py   plans of runs with and without rollouts; images.py: those of their prompts
report.py    phases of a run, and what they add up to; choices.py: what makes it fit
command.py   the command; budget.py: the same trace for a run's token budget
"""
