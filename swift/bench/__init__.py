"""`swift bench`: swift against other trainers on equal work, in processes of their own that take turns.

`works` lists the rows and `measure` measures one; `run` is the command. `flops` counts what the mathematics needs,
`regression` compares ratios with recorded ones; both are pure. Of the two sides, `swift_side` knows swift and
`trl_side` knows TRL; `ms_swift_turns` runs in another interpreter and imports nothing from here.
"""
