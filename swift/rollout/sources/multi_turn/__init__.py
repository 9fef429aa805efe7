"""Rollouts of several turns: schedulers, functions and gym environments, on one kind of trajectory.

request -> TrajectorySource -> Trajectory <-> environment      one coroutine per sample
                 |                 |
               engine  <- turn ----+                           turns of all samples share the engine's batch
"""
